"""The LightningModule: next-token loss, exact token-weighted gradients, validation totals.

Choices: the loss that is differentiated is a *sum* over labelled tokens, and the gradient is divided by the
number of tokens of the whole optimizer step (all micro-batches, all ranks) just before clipping. So a step's
gradient does not depend on how its tokens are cut into micro-batches and ranks. Nothing here waits for the
device except every `log_every_n_steps` optimizer steps, when numbers are written.
"""

import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from src.carry import CarriedStates
from src.data import IGNORE
from src.errors import UserError
from src.layers.level_scales import Beyond, LevelScales
from src.metrics import ExactMatch, RecallTotals, TokenTotals, accuracies
from src.model import LanguageModel, ModelConfig
from src.optim import OptimConfig, build_optimizer
from src.options import build, nearest
from src.registry import MIXERS, build_options, load_file


class LanguageModule(LightningModule):
    """A language model under training.

    Args:
        config: the run's whole configuration as a plain dict (`dataclasses.asdict`), so that checkpoints
            load with `weights_only=True`; used here are `model`, `mixer`, `optim` and `trainer.compile`.
        vocab_size: number of token ids.
        max_seq_len: longest training sequence, in tokens.

    Batches are dicts: `input_ids [B, T]`, `labels [B, T]` (already shifted; -100 has no loss), `cu_seqlens
    [N + 1]` or None, `n_bytes` and `n_words` (of the labelled text) or None, `n_pairs` (recall tasks) or None.

    Tags: `train/loss` (the optimizer step's Σ NLL / Σ tokens), `train/lr`, `train/grad_norm` (before
    clipping), `val/loss`, `val/perplexity` (by token), `val/word_perplexity`, `val/bits_per_byte`, of recall
    `val/accuracy`, `val/accuracy/pairs_<N>` and `val/accuracy/<T>x<N>`, of needles `val/exact_match`, the same under
    `test/`. The x axis is the number of optimizer steps done.
    """

    def __init__(self, config: dict, vocab_size: int, max_seq_len: int) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.model: LanguageModel | None = None
        self.metrics: dict[str, float] = {}
        """The last value of every tag."""
        self.first_validation: dict[str, float] = {}
        """What the untrained model's validation gave."""
        self.validated_step = -1
        """The optimizer step of the last whole validation."""
        self.recall_kinds: dict[tuple[int, int], tuple[float, int]] = {}
        """Of the last evaluation, by (length, pairs): the sum of the sequences' accuracies, and the sequences."""
        self.carried = CarriedStates()
        """Of rows that continue each other from step to step (data.carry_state)."""
        self.loaded_step = 0
        """Optimizer steps of the checkpoint that this was loaded from."""
        self.head_loss = head_loss

    def configure_model(self) -> None:
        if self.model is not None:  # Lightning calls this again for every fit, validate and test
            return
        self.model = build_model(**self.hparams)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        config = build(OptimConfig, self.hparams["config"]["optim"], "optim")
        return build_optimizer(self.model, config, self.trainer.max_steps)

    # ---- loss

    def on_before_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        """Find the labelled places on the host: doing it on the device would wait for the device."""
        labelled = (batch["labels"] != IGNORE).flatten()
        n = int(labelled.sum())
        places = None if n == labelled.numel() else labelled.nonzero().flatten()
        return {**batch, "n_tokens": n, "labelled": places}

    def labelled_hidden(self, batch: dict[str, Any], micro_batch: int = 0) -> tuple[Tensor, Tensor]:
        """Hidden states `[N, D]` and labels `[N]` of the N labelled places only, in row-major order."""
        if "carry" in batch:
            hidden = self.carried.hidden(self.model, batch, micro_batch).flatten(0, 1)
        else:
            hidden = self.model.hidden(batch["input_ids"], batch["cu_seqlens"]).flatten(0, 1)
        labels = batch["labels"].flatten()
        if batch["labelled"] is not None:
            hidden, labels = hidden[batch["labelled"]], labels[batch["labelled"]]
        return hidden, labels

    def nll_sum(self, batch: dict[str, Any], micro_batch: int = 0) -> Tensor:
        """Summed negative log-likelihood of the labelled tokens, in nats."""
        return self.head_loss(self.model, *self.labelled_hidden(batch, micro_batch))

    # ---- training

    def on_fit_start(self) -> None:
        if self.hparams["config"]["trainer"]["compile"]:  # here: evaluation and generation do not wait for it
            for block in self.model.blocks:
                block.compile()  # in place: parameter names stay as they are
            # The number of labels differs from step to step.
            self.head_loss = torch.compile(head_loss, dynamic=True)
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self.window = torch.zeros(2, dtype=dtype, device=self.device)  # Σ NLL, Σ tokens since the last step
        self.carried.to(self.device)
        self.failed = torch.zeros((), device=self.device)  # 1 from the first non-finite gradient on

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        nll = self.nll_sum(batch, batch_idx % self.trainer.accumulate_grad_batches)
        self.window[0] += nll.detach()
        self.window[1] += batch["n_tokens"]
        return nll * self.trainer.accumulate_grad_batches  # Lightning divides by it

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Turn the sums of gradients into the mean over the step's tokens; Lightning clips after this."""
        self.step_totals = self.trainer.strategy.reduce(self.window.clone(), reduce_op="sum")
        self.window.zero_()
        # Data-parallel strategies have averaged the ranks' gradients: undo their division.
        scale = (self.trainer.world_size / self.step_totals[1].clamp(min=1)).float()
        torch._foreach_mul_([p.grad for p in self.parameters() if p.grad is not None], scale)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the total norm, and stop all updates from the first non-finite gradient on.

        Fused AdamW skips a step on the device where `found_inf` is 1, so nothing has to be read back: the
        parameters stay those that gave the bad gradient until the guard looks at `failed`.
        """
        parameters = [p for p in self.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.failed = torch.maximum(self.failed, (~self.grad_norm.isfinite()).float())
        if optimizer.param_groups[0].get("fused"):
            optimizer.found_inf = self.failed
        if gradient_clip_val:
            nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val, self.grad_norm)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        lr = optimizer.param_groups[0]["lr"]
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        step = self.trainer.global_step + 1  # Lightning counts this step after the hook
        if self.is_log_step(step):
            nll, tokens, norm = torch.cat([self.step_totals, self.grad_norm[None]]).tolist()
            values = {"train/loss": nll / max(tokens, 1), "train/lr": lr, "train/grad_norm": norm}
            self.record(values, step)

    def ends_step(self, batch_idx: int) -> bool:
        """Whether the micro-batch of this index is the last of its optimizer step."""
        return (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0

    def flops(self, batch: dict[str, Any]) -> float:
        """Forward FLOPs of a micro-batch; packed rows count as `data.seq_len` long, whatever their documents."""
        n_tokens, length = batch["input_ids"].numel(), batch["input_ids"].shape[1]
        if batch["cu_seqlens"] is not None:
            length = min(length, self.hparams["config"]["data"]["seq_len"])
        return self.model.flops(n_tokens, length, batch["n_tokens"])

    def is_log_step(self, step: int) -> bool:
        """Whether numbers are written after optimizer step `step` (1 is the first)."""
        return step % self.trainer.log_every_n_steps == 0 or step in (1, self.trainer.max_steps)

    # ---- validation and test

    def on_validation_epoch_start(self) -> None:
        self.totals, self.recall = TokenTotals(self.device), RecallTotals(self.device)
        self.exact = ExactMatch(self.device)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        hidden, labels = self.labelled_hidden(batch)
        logits = self.model.head(hidden)
        nll = F.cross_entropy(logits.float(), labels, reduction="sum")
        self.totals.update(nll, batch["n_tokens"], batch["n_bytes"], batch["n_words"])
        if batch["n_pairs"] is not None:
            n_rows, seq_len = batch["labels"].shape
            places = batch["labelled"]
            if places is None:
                places = torch.arange(len(labels), device=labels.device)
            right = logits.argmax(-1) == labels
            self.recall.update(right, places // seq_len, n_rows, seq_len, batch["n_pairs"])
        if batch.get("examples") and batch["labelled"] is not None and len(labels):
            self.exact.update(logits.argmax(-1) == labels, batch["labelled"], batch["cu_seqlens"])

    def on_validation_epoch_end(self) -> None:
        values = self._end_of_evaluation("val")
        self.validated_step = self.trainer.global_step
        if self.validated_step == 0:
            self.first_validation = values

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self._end_of_evaluation("test")

    def _end_of_evaluation(self, split: str) -> dict[str, float]:
        totals = self.totals.compute()
        self.evaluated_tokens = int(totals.pop("tokens", 0))
        self.recall_kinds = self.recall.compute() if self.recall.update_called else {}
        values = totals | accuracies(self.recall_kinds) | (self.exact.compute() if self.exact.update_called else {})
        self.evaluated = {f"{split}/{name}": value for name, value in values.items()}
        self.record(self.evaluated, self.trainer.global_step)
        return self.evaluated

    # ---- numbers and checkpoints

    def record(self, values: dict[str, float], step: int) -> None:
        """Write values to every logger at x = `step` and keep them in `metrics`; callbacks use it too."""
        self.metrics |= values
        for logger in self.trainer.loggers:
            logger.log_metrics(values, step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in ("metrics", "first_validation", "validated_step"):
            checkpoint[name] = getattr(self, name)
        if self.carried.states:
            checkpoint["carried_states"] = self.carried.save()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in ("metrics", "first_validation", "validated_step"):
            setattr(self, name, checkpoint[name])
        self.loaded_step = checkpoint["global_step"]
        if self._trainer is not None and self.trainer.state.fn == "fit":
            self._recount_micro_batches(checkpoint)
            if "carried_states" in checkpoint:
                ranks, micro_batches = self.trainer.world_size, self.trainer.accumulate_grad_batches
                self.carried.load(checkpoint["carried_states"], self.trainer.global_rank, ranks, micro_batches)

    def _recount_micro_batches(self, checkpoint: dict[str, Any]) -> None:
        """Make Lightning's batch counters those of the present accumulation.

        A run may continue with other micro-batches or on more ranks; Lightning counts micro-batches and takes
        a step where the count is a multiple of the accumulation.
        """
        batches = checkpoint["global_step"] * self.trainer.accumulate_grad_batches
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            unfinished = counts["ready"] - counts["completed"]  # 1: saved before the hook's batch was counted
            counts.update(ready=batches, started=batches, processed=batches, completed=batches - unfinished)


def head_loss(model: LanguageModel, hidden: Tensor, labels: Tensor) -> Tensor:
    """Summed negative log-likelihood, in nats, of labels `[N]` after `hidden [N, D]`.

    Compiled, it writes no logits in fp32: of a large vocabulary they take more memory and time than the blocks.
    """
    return F.cross_entropy(model.head(hidden).float(), labels, reduction="sum")


def build_model(config: dict, vocab_size: int, max_seq_len: int) -> LanguageModel:
    """The model of a run's configuration (a plain dict); plugins that it names are loaded first."""
    for path in config.get("plugins", ()):
        load_file(path)
    options = dict(config["mixer"])
    mixer = build_options(MIXERS.get(options["name"]), options, "mixer")
    model = build(ModelConfig, config["model"], "model")
    return LanguageModel(model, mixer, vocab_size, max_seq_len)


def open_checkpoint(path: Path, device: str, hint: str = "") -> dict[str, Any]:
    """What a checkpoint holds; its tensors are read when they are used, on the meta device never.

    Raises UserError for a file that cannot be read or is none, with `hint` at its end.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}){hint}") from error
    try:
        saved = torch.load(path, map_location=device, weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError):
        saved = None
    if not isinstance(saved, dict) or not {"state_dict", "hyper_parameters"} <= saved.keys():
        raise UserError(f"{path} is damaged, or no checkpoint of a training{hint}")
    return saved


def load_module(checkpoint: Path, device: torch.device | str = "cpu") -> LanguageModule:
    """The trained module of a checkpoint, on `device`, ready for inference."""
    other = checkpoint.with_name("best.ckpt" if checkpoint.stem == "last" else "last.ckpt")
    open_checkpoint(checkpoint, "meta", f"; checkpoint={other.stem} is there" if other.is_file() else "")
    module = LanguageModule.load_from_checkpoint(checkpoint, map_location=device, weights_only=True)
    return module.eval()


def set_beyond(module: LanguageModule, beyond: Beyond | None) -> None:
    """Let `beyond` serve the levels beyond the trained length (None: as trained). Raises UserError without scales."""
    if beyond is None:
        return
    scales = [layer for layer in module.modules() if isinstance(layer, LevelScales)]
    if not scales:
        raise UserError(f"beyond={beyond}: mixer={module.hparams['config']['mixer']['name']} has no level scales")
    for layer in scales:
        layer.beyond = beyond


def pick_device(name: str) -> torch.device:
    """The device of that name, or the best there is; an absent one is a user's mistake."""
    if name == "auto":
        # Available, not only built in: PyTorch for CUDA runs on machines without a GPU too.
        kind = torch.accelerator.current_accelerator(check_available=True)
        return kind if kind is not None and kind.type in ("cuda", "mps") else torch.device("cpu")
    if not re.fullmatch(r"cpu|mps|cuda(:[0-9]+)?", name):
        meant = nearest("cuda" if "gpu" in name.lower() else name.lower(), ("auto", "cpu", "cuda", "mps"))
        raise UserError(f"device={name}: must be auto, cpu, cuda, cuda:<number> or mps{meant}")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device={name}: not available here ({str(error).splitlines()[0]})") from error
    return device


def check_backend(mixer: object, device: str, precision: str) -> None:
    """Raises UserError where a mixer's options ask for kernels that nothing here can run."""
    asked = {"mixer.backend": getattr(mixer, "backend", None)}
    for name, inner in getattr(mixer, "options", {}).items():  # of a hybrid
        asked[f"mixer.options.{name}.backend"] = inner.get("backend")
    for key, backend in asked.items():
        if backend != "triton" or device == "cuda":
            continue
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise UserError(
                f"{key}=triton: needs a CUDA device, or TRITON_INTERPRET=1 to interpret kernels slowly "
                "(auto takes Triton on CUDA and PyTorch elsewhere)"
            )
        if precision != "32-true":
            raise UserError(f"precision={precision}: {key}=triton is interpreted in 32-true only")
