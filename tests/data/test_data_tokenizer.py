"""Tokenizers: lossless, deterministic, end-of-text never from the text, kept with a run."""

import json
import pickle
import time

import numpy as np
import pytest
import tokenizers

from src.data.common.files import pieces
from src.data.common.tokenizer import (
    EOT,
    ByteTokenizer,
    SubwordTokenizer,
    find_tokenizer,
    load_tokenizer,
    train_bpe,
)
from src.errors import UserError


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request, prose):
    return ByteTokenizer() if request.param == "bytes" else train_bpe([prose(20_000)], 400)


def test_any_text_survives(tokenizer, prose):
    for text in (prose(500), "", "\r\n\0 \u2028 \U0010ffff", " leading", "trailing \n\n"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_the_spelling_of_end_of_text_is_ordinary_text(tokenizer):
    text = f"a{EOT}b {EOT}{EOT}"
    ids = tokenizer.encode(text)
    assert tokenizer.eot not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eot]) == EOT


def test_kept_with_a_run_and_pickled(tokenizer, prose, tmp_path):
    tokenizer.save(tmp_path)
    text = prose(300) + EOT
    assert type(load_tokenizer(tmp_path)) is type(tokenizer)
    for other in (load_tokenizer(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert other.fingerprint == tokenizer.fingerprint
        assert (other.eot, other.vocab_size) == (tokenizer.eot, tokenizer.vocab_size)
        assert list(other.encode(text)) == list(tokenizer.encode(text))


def test_a_run_keeps_the_files_of_a_hugging_face_folder(tokenizer, tmp_path, prose):
    tokenizer.save(tmp_path)
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in (prose(300), "".join(map(chr, range(1, 0x800))), " \n\n a漢🙂 "):
        ids = plain.encode(text, add_special_tokens=False).ids
        assert ids == list(tokenizer.encode(text))
        assert plain.decode(ids) == text
    assert plain.token_to_id(EOT) == tokenizer.eot
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == EOT


def test_the_end_of_text_of_a_run_is_the_one_that_was_chosen(tmp_path):
    _foreign(tmp_path / "tokenizer.json", "<end>", True, "</s>")
    chosen = find_tokenizer(str(tmp_path), eot="<end>")
    chosen.save(tmp_path)
    for again in (load_tokenizer(tmp_path), find_tokenizer(str(tmp_path)), find_tokenizer(str(tmp_path), eot="<end>")):
        assert (again.eot_token, again.fingerprint) == ("<end>", chosen.fingerprint)
    assert find_tokenizer(str(tmp_path), eot="</s>").eot_token == "</s>"


def test_a_run_without_tokenizer_says_so(tmp_path):
    with pytest.raises(UserError, match="not trained on text"):
        load_tokenizer(tmp_path)


def test_bpe_is_deterministic_and_as_large_as_asked(prose):
    text = prose(30_000)
    first, second = (train_bpe(list(pieces([text], 500)), 300) for _ in range(2))
    assert first.vocab_size == 300
    assert first.fingerprint == second.fingerprint


def test_bpe_needs_room_for_bytes():
    with pytest.raises(UserError, match=r"data.vocab_size=256: must be at least 257"):
        train_bpe(["a"], 256)


def test_pieces_do_not_change_the_tokens(prose, seed):
    text = prose(5_000) + "x" * 300 + "   \n\n\t  y\n" * 40
    tokenizer = train_bpe([text], 500)
    for size in (60, 1000):
        parts = list(pieces([text[:777], text[777:]], size))
        assert "".join(parts) == text
        assert max(map(len, parts)) <= 2 * size
        if size == 1000:  # above the longest word: every cut is where a word ends
            assert np.concatenate(tokenizer.encode_batch(parts)).tolist() == tokenizer.encode(text)


def _foreign(path, eot: str, special: bool, *more: str):
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    core.add_tokens([tokenizers.AddedToken(eot, special=special)])
    core.add_special_tokens(["[BOS]", *more])
    core.post_processor = tokenizers.processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 4)])
    core.enable_truncation(2)
    core.save(str(path))


@pytest.mark.parametrize("special", [True, False])
def test_foreign_file(tmp_path, special):
    path = tmp_path / "tokenizer.json"
    _foreign(path, "</s>", special)
    for name in (str(path), str(tmp_path)):
        tokenizer = find_tokenizer(name)
        assert (tokenizer.eot, tokenizer.vocab_size) == (3, 5)
        assert tokenizer.encode("a b a") == [1, 2, 1]  # neither [BOS] nor cut
        assert tokenizer.eot not in tokenizer.encode("a </s> b")


def test_foreign_file_without_usual_end_of_text(tmp_path):
    path = tmp_path / "tokenizer.json"
    _foreign(path, "<end>", True)
    with pytest.raises(UserError, match=r"no end-of-text token.*data.eot=.*<end>"):
        find_tokenizer(str(path))
    assert find_tokenizer(str(path), eot="<end>").eot == 3


def test_what_is_no_tokenizer(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="there is no file"):
        find_tokenizer(str(tmp_path / "none.json"))
    broken = tmp_path / "broken.json"
    for content in ("{", json.dumps({"a": 1})):
        broken.write_text(content)
        with pytest.raises(UserError, match=r"not a tokenizer.json"):
            find_tokenizer(str(broken))


def test_hub_name_without_network_is_one_quick_error(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("src.data.common.hub.reachable", lambda kind, name: False)
    start = time.perf_counter()
    with pytest.raises(
        UserError, match=r"data.tokenizer=byte: .*Hub cannot be reached.*allowed: bpe, bytes.*did you mean bytes\?"
    ):
        find_tokenizer("byte")
    assert time.perf_counter() - start < 5


def test_a_lossless_fingerprint_knows_the_end_of_text(prose):
    core = train_bpe([prose(5_000)], 300).core
    core.add_special_tokens(["</s>"])
    assert SubwordTokenizer(core).fingerprint != SubwordTokenizer(core, "</s>").fingerprint
