"""`init_from=`: a new run that starts from the weights of another one, as in fine-tuning."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from src import runs
from src.config import Config
from src.errors import UserError
from src.module import LanguageModule, open_checkpoint


@dataclass
class Start:
    """The run to start from, and its last checkpoint."""

    name: str
    checkpoint: dict[str, Any]

    @classmethod
    def of(cls, cfg: Config) -> "Start":
        """The run that `cfg.init_from` names; `cfg` takes over its tokenizer and trained length. Raises UserError."""
        run_dir = runs.find(cfg.init_from, cfg.run.dir, "init_from")
        checkpoint = open_checkpoint(runs.checkpoint(run_dir), "cpu")
        saved = checkpoint["hyper_parameters"]
        if cfg.mixer.name != saved["config"]["mixer"]["name"]:
            raise UserError(
                f"mixer={cfg.mixer.name}: init_from={cfg.init_from} is a run of {saved['config']['mixer']['name']}"
            )
        if cfg.model.max_seq_len is None:
            cfg.model.max_seq_len = saved["max_seq_len"]
        tokenizer = run_dir / "tokenizer.json"
        if hasattr(cfg.data, "tokenizer"):
            if not tokenizer.is_file():
                raise UserError(
                    f"data={cfg.data.name}: init_from={cfg.init_from} was trained on"
                    f" data={saved['config']['data']['name']}, which has no tokenizer; its token ids are no text"
                )
            _take_tokenizer(cfg, tokenizer)
        return cls(cfg.init_from, checkpoint)

    def load_into(self, module: LanguageModule) -> None:
        """Raises UserError where the model has other parameters or other shapes than the saved one."""
        saved, own = self.checkpoint["state_dict"], module.state_dict()
        for key in {**saved, **own}:
            shapes = [tuple(weights[key].shape) if key in weights else None for weights in (saved, own)]
            if shapes[0] != shapes[1]:
                raise UserError(
                    f"init_from={self.name}: parameter {key} has shape {shapes[0]} there and {shapes[1]} here:"
                    " give no other model, mixer or tokenizer options"
                )
        module.load_state_dict(saved)


def _take_tokenizer(cfg: Config, tokenizer: Path) -> None:
    default = {f.name: f.default for f in fields(cfg.data)}["tokenizer"]
    if cfg.data.tokenizer not in (default, str(tokenizer)):
        raise UserError(
            f"data.tokenizer={cfg.data.tokenizer}: init_from={cfg.init_from} brings its own tokenizer; leave it out"
        )
    cfg.data.tokenizer = str(tokenizer)
