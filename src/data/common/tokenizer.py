"""Text to token ids and back: bytes, a byte-level BPE trained here, or any tokenizer.json.

A text that happens to contain the end-of-text token's spelling is encoded as ordinary text; the token
itself is only ever put in by number, between documents.
"""

import difflib
import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from src.data.common.hub import tokenizer_file
from src.errors import UserError
from src.files import write_json, write_text

EOT = "<|endoftext|>"
CONFIG = "tokenizer_config.json"
USUAL_EOT = (EOT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


class Tokenizer(ABC):
    """Encodes documents; ids are 0 … vocab_size - 1, `eot` is the end-of-text token's."""

    vocab_size: int
    eot: int

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The ids of each text, without special tokens; texts are encoded in parallel."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids; bytes that are not UTF-8 (a character cut in two) become U+FFFD."""

    @abstractmethod
    def _as_dict(self) -> dict[str, object]:
        """All that is needed to make it again, as JSON."""

    def encode(self, text: str) -> list[int]:
        return list(self.encode_batch([text])[0])

    def __reduce__(self) -> tuple:
        return _from_dict, (self._as_dict(),)  # the library's own pickles forget its switches

    @property
    def fingerprint(self) -> str:
        """Identifies the mapping (16 hex digits)."""
        return hashlib.sha256(json.dumps(self._as_dict(), sort_keys=True).encode()).hexdigest()[:16]

    @abstractmethod
    def _as_library(self) -> tuple[tokenizers.Tokenizer, str]:
        """The same as an object of the `tokenizers` library, and its end-of-text token."""

    def save(self, run_dir: Path) -> None:
        """Write what `load_tokenizer` reads and Hugging Face's libraries do: tokenizer.json, and beside it what ends
        a text."""
        core, eot = self._as_library()
        write_json(Path(run_dir, CONFIG), {"eos_token": eot, "tokenizer_class": "PreTrainedTokenizerFast"})
        write_text(Path(run_dir, "tokenizer.json"), core.to_str())


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes 0 … 255 and end-of-text 256."""

    vocab_size = 257
    eot = 256

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        parts = (bytes([i]) if i < self.eot else EOT.encode() for i in map(int, ids))
        return b"".join(parts).decode(errors="replace")

    def _as_dict(self) -> dict[str, object]:
        return {"kind": "bytes"}

    def _as_library(self) -> tuple[tokenizers.Tokenizer, str]:
        core = tokenizers.Tokenizer(models.BPE({sign: byte for byte, sign in enumerate(_byte_signs())}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens([EOT])
        return core, EOT


def _byte_signs() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2): itself where it is printable
    Latin-1, else the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


class SubwordTokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library; `eot` names the end-of-text token (None: a usual one)."""

    def __init__(self, core: tokenizers.Tokenizer, eot: str | None = None, origin: str = "tokenizer") -> None:
        vocabulary = core.get_vocab()
        candidates = USUAL_EOT if eot is None else (eot,)
        found = [token for token in candidates if token in vocabulary]
        if not found:
            special = sorted(token.content for token in core.get_added_tokens_decoder().values() if token.special)
            raise UserError(
                f"data.tokenizer={origin} has no end-of-text token {' or '.join(candidates)}: name one with "
                f"data.eot= (its special tokens: {', '.join(special[:12]) or 'none'})"
            )
        # Special tokens can be switched off while encoding, other added tokens cannot.
        core.add_special_tokens([AddedToken(found[0], special=True, normalized=False)])
        core.encode_special_tokens = True
        core.no_truncation()
        core.no_padding()
        self.core, self.eot_token = core, found[0]
        self.eot = vocabulary[found[0]]
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have holes

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [e.ids for e in self.core.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.core.decode([int(i) for i in ids], skip_special_tokens=False)

    def _as_library(self) -> tuple[tokenizers.Tokenizer, str]:
        return self.core, self.eot_token

    def _as_dict(self) -> dict[str, object]:
        return {"kind": "subword", "eot": self.eot_token, "tokenizer": json.loads(self.core.to_str())}


def train_bpe(texts: Iterable[str], vocab_size: int) -> SubwordTokenizer:
    """Byte-level BPE (Sennrich et al. 2016; bytes and word pattern of GPT-2) with `vocab_size` entries.

    The entries are end-of-text (0), 256 bytes, and merges of pairs that occur at least twice: fewer than
    asked where the text is small. A pure function of the texts.
    """
    if vocab_size < 257:
        raise UserError(f"data.vocab_size={vocab_size}: must be at least 257 (256 bytes and end-of-text)")
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    core.train_from_iterator(texts, trainer)
    return SubwordTokenizer(core)


def find_tokenizer(name: str, eot: str | None = None) -> Tokenizer:
    """The tokenizer that `data.tokenizer=name` means, other than "bpe": "bytes", a file, a Hub name.

    Raises UserError where there is none, within seconds.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        if path.suffix == ".json" or path.is_absolute() or name.startswith((".", "~")):
            raise UserError(f"data.tokenizer={name}: there is no file {path}")
        close = difflib.get_close_matches(name, ("bpe", "bytes"), n=1)
        try:
            path = tokenizer_file(name)
        except UserError as error:
            meant = f"; did you mean {close[0]}?" if close else ""
            raise UserError(
                f"data.tokenizer={name}: {error} (allowed: bpe, bytes, a tokenizer.json, a Hub name){meant}"
            ) from error
        # Alone: whether its folder has more depends on what else was downloaded.
        return _read(path, eot, name)
    return _read(path, eot or _eot_beside(path), name)


def load_tokenizer(run_dir: Path) -> Tokenizer:
    """The tokenizer that a run folder keeps; needs neither corpus nor cache nor network."""
    path = kept_tokenizer(run_dir)
    return _read(path, _eot_beside(path), str(path))


def kept_tokenizer(run_dir: Path) -> Path:
    """The file of a run folder's tokenizer. Raises UserError where there is none."""
    path = Path(run_dir, "tokenizer.json")
    if not path.is_file():
        raise UserError(f"{run_dir} has no tokenizer.json: it was not trained on text, or has lost it")
    return path


def _eot_beside(path: Path) -> str | None:
    """The end-of-text token that a tokenizer_config.json in the folder of a tokenizer.json names."""
    try:
        token = json.loads(path.with_name(CONFIG).read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    return token.get("content") if isinstance(token, dict) else token


def _read(path: Path, eot: str | None, origin: str) -> Tokenizer:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if "kind" in content:  # from a run folder of before these had the library's files
            return _from_dict(content)
        core = tokenizers.Tokenizer.from_str(json.dumps(content))
        if core.to_str() == ByteTokenizer()._as_library()[0].to_str():
            return ByteTokenizer()
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise UserError(f"data.tokenizer={origin}: {path} is not a tokenizer.json ({error})") from error
    return SubwordTokenizer(core, eot, origin)


def _from_dict(content: dict) -> Tokenizer:
    if content["kind"] == "bytes":
        return ByteTokenizer()
    return SubwordTokenizer(tokenizers.Tokenizer.from_str(json.dumps(content["tokenizer"])), content["eot"])
