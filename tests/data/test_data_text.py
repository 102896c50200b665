"""data=text: any files, disjoint splits, one clear error for what cannot work."""

import gzip
import hashlib
import re

import pytest

from src.data import text as text_module
from src.data.common.files import Slice, cut_near, read
from src.errors import UserError


def _documents(module) -> dict[str, list[str]]:
    return {split: ["".join(parts) for parts in module.documents(split)] for split in ("train", "val", "test")}


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_one_file_is_cut_into_three_parts(text, newline):
    lines = [f"line number {i}" for i in range(400)]
    module = text({"a.txt": newline.join(lines)})
    parts = _documents(module)
    whole = "".join(parts[split][0] for split in ("train", "val", "test"))
    assert whole == "\n".join(lines)  # nothing lost, nothing twice, \r\n as \n
    got = {split: parts[split][0].splitlines() for split in parts}
    assert not set(got["train"]) & set(got["val"])
    assert not set(got["test"]) & (set(got["train"]) | set(got["val"]))
    assert all(15 <= len(got[split]) <= 25 for split in ("val", "test"))
    assert module.describe()["val.bytes"] == len(parts["val"][0])


@pytest.mark.parametrize("size", [100, 1000, 100_000])
def test_a_file_without_line_ends_is_cut_between_characters(text, size):
    content = "é漢🙂x" * (size // 4)
    parts = _documents(text({"a.txt": content}))
    assert "".join(parts[split][0] for split in ("train", "val", "test")) == content
    assert all(parts[split][0] for split in parts)


def test_cut_prefers_the_nearest_line_end(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"0123\n567\n9abcdef")
    assert [cut_near(path, target, 3) for target in (3, 6, 8, 9, 11, 14)] == [5, 5, 9, 9, 9, 14]


def test_many_files_are_split_by_content(text):
    files = {f"{i % 7}/{i:03}.md": f"document {i}" for i in range(200)}
    files["copy.txt"] = files["0/000.md"]
    module = text(files)
    parts = _documents(module)
    assert sorted(document for split in parts for document in parts[split]) == sorted(files.values())
    sets = [set(documents) for documents in parts.values()]
    assert len(set.union(*sets)) == sum(map(len, sets))
    assert all(sets)


def test_a_file_stays_in_its_split_when_others_come_and_names_change(text, tmp_path):
    files = {f"{i:03}.txt": f"document {i}" for i in range(150)}
    before = _documents(text(files, split="files"))
    for path in (tmp_path / "corpus").iterdir():
        path.rename(path.with_name("new-" + path.name))
    after = _documents(text({f"x{i}.txt": f"more {i}" for i in range(50)}, split="files"))
    assert all(set(before[split]) <= set(after[split]) for split in before)


def test_few_files_each_give_their_tail(text, prose):
    parts = _documents(text({"a.txt": prose(2000), "b.txt": prose(3000)}))
    assert [len(parts[split]) for split in ("train", "val", "test")] == [2, 2, 2]


def test_own_validation_and_test_files(text, tmp_path, prose):
    for name in ("val.txt", "test.txt"):
        (tmp_path / name).write_text(name + prose(300))
    module = text({"a.txt": prose(1000)}, val_path=[str(tmp_path / "val.txt")], test_path=[str(tmp_path / "test.txt")])
    parts = _documents(module)
    assert len(parts["train"][0]) == 1000
    assert parts["val"][0].startswith("val.txt")
    assert parts["test"][0].startswith("test.txt")
    module = text({}, val_path=[str(tmp_path / "val.txt")])
    assert sum(len(_documents(module)[split][0]) for split in ("train", "test")) == 1000


def test_one_file_for_two_purposes_is_refused(text, tmp_path, prose):
    with pytest.raises(UserError, match=r"a.txt is in both data.path and data.val_path"):
        text({"a.txt": prose(1000)}, val_path=[str(tmp_path / "corpus")])


def test_no_test_split(text, prose):
    module = text({"a.txt": prose(1000)}, test_fraction=0.0)
    assert module.describe()["test.tokens"] == 0
    with pytest.raises(UserError, match="data=text has no test split"):
        module.test_dataloader()


def test_odd_files_work(text, prose):
    files = {
        "empty.txt": b"",
        "bom.txt": b"\xef\xbb\xbf" + b"after the mark\n" * 40,
        "windows.txt": b"line\r\n" * 100,
        "mac.txt": b"line\r" * 100,
        "no-end.txt": b"x" * 300,
        ".hidden.txt": b"\xff",
        "picture.png": b"\x89PNG\xff",
    }
    parts = _documents(text(files))
    joined = "".join(document for split in parts for document in parts[split])
    assert "\r" not in joined
    assert "\ufeff" not in joined
    assert joined.count("line\n") == 200


@pytest.mark.parametrize("where", [0, 1500, (1 << 20) - 1, 1 << 20, (1 << 20) + 5000])
def test_bytes_that_are_not_utf8_are_named(tmp_path, where):
    path = tmp_path / "bad.txt"
    path.write_bytes("é".encode() * (where // 2) + b"x" * (where % 2) + b"\xff" + b"y" * 100)
    part = Slice(path, 0, path.stat().st_size)
    with pytest.raises(UserError, match=rf"bad.txt is not UTF-8 \(byte {where}\).*encoding_errors=replace"):
        list(read(part, "strict"))
    assert "".join(read(part, "replace")).count("\ufffd") == 1


def test_a_cut_character_at_the_end_is_named(text):
    with pytest.raises(UserError, match=r"a.txt is not UTF-8 \(byte 200\)"):
        text({"a.txt": b"x" * 200 + "é".encode()[:1]})


def test_replacing_works_and_is_another_content(text):
    files = {"a.txt": b"good \xff bad \n" * 100}
    module = text(files, encoding_errors="replace")
    assert "\ufffd" in _documents(module)["train"][0]


def test_blocks_join_across_any_border(tmp_path, monkeypatch):
    monkeypatch.setattr("src.data.common.files.BLOCK", 5)
    content = "ab\r\ncd\rß漢\r\n\r\n🙂"
    path = tmp_path / "a"
    path.write_bytes(content.encode())
    assert "".join(read(Slice(path, 0, len(content.encode())))) == content.replace("\r\n", "\n").replace("\r", "\n")


def test_what_a_folder_without_text_holds_is_said(text):
    with pytest.raises(UserError, match=r"corpus: no .*\.txt.* file in that folder \(it has 2 \.csv, 1 \.pdf\)"):
        text({"a.csv": "1", "b.csv": "2", "c.pdf": "3"})


def test_other_extensions(text, prose):
    assert text({"a.csv": prose(500), "b.txt": prose(500)}, extensions=["csv"]).describe()["train.documents"] == 1


def test_patterns_lists_and_repeats(text, tmp_path, prose):
    files = {"x/a.txt": prose(500), "x/y/b.log": prose(500), "z/c.txt": prose(500)}
    root = tmp_path / "corpus"
    paths = [
        str(root / "**" / "*.log"),
        str(root / "z"),
        str(root / "z" / "c.txt"),
        str(root / "x" / "a.txt"),
    ]
    assert text(files, path=paths).describe()["train.documents"] == 3
    assert text(files, path=str(root)).describe()["train.documents"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": []}, "data.path is not set"),
        ({"path": ["/nowhere/at/all*"]}, r"data.path=/nowhere/at/all\*: no such file or folder"),
        ({"val_fraction": 0.0}, "needs a validation split; give data.val_path"),
        ({"val_fraction": 0.6, "test_fraction": 0.5}, "must be below 1"),
        ({"test_fraction": -0.1}, "data.test_fraction=-0.1"),
        ({"split": "files"}, "too little text for a (train|val|test) split"),
    ],
)
def test_mistakes_are_one_line(text, options, message):
    with pytest.raises(UserError, match=message) as caught:
        text({"a.txt": "text\n" * 50}, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["a", "ab\n"])
def test_too_little_text_names_the_corpus(text, content):
    with pytest.raises(UserError, match=r"too little text for a .* split"):
        text({"a.txt": content})


def test_empty_files_are_called_so(text):
    with pytest.raises(UserError, match=r"a.txt is empty$"):
        text({"a.txt": ""})
    with pytest.raises(UserError, match=r"all 2 files are empty$"):
        text({"b.txt": ""})


@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize(
    ("name", "encode", "message"),
    [
        ("a.txt", lambda text: text.encode("utf-16"), "a.txt is UTF-16: convert it to UTF-8"),
        ("a.txt", lambda text: text.encode("utf-32"), "a.txt is UTF-32: convert it to UTF-8"),
        ("a.txt.gz", lambda text: gzip.compress(text.encode()), "a.txt.gz is compressed by gzip: unpack it"),
        ("a.jsonl", str.encode, "a.jsonl: a table, not a text; data=hub data.path= reads its texts"),
    ],
)
def test_files_of_another_kind_are_named(text, tmp_path, name, encode, message, errors):
    path = tmp_path / name
    path.write_bytes(encode("some text\n" * 500))
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        text({}, path=[str(path)], encoding_errors=errors)
    assert "\n" not in str(caught.value)


def test_a_table_that_is_asked_for_as_text_is_one(text, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 500)
    module = text({}, path=[str(tmp_path / "rows.jsonl")], extensions=[".jsonl"])
    assert module.tokenizer.decode(module.stream("train").tokens[1:14]) == '{"text": "a"}'


def test_rows_that_a_user_would_hardly_want_are_noted(text):
    content = {"a.txt": "text\n" * 100}
    assert text(content, seq_len=20, batch_size=2).notes() == []
    short = text(content, seq_len=100_000, batch_size=1).notes()
    assert [note.partition(":")[2] for note in short] == [" its one row is shorter than data.seq_len=100000"]
    few = text(content, seq_len=200, batch_size=8).notes()
    assert few == ["the train split has 2 rows: a step of data.batch_size=8 repeats them"]


def test_an_unreadable_file_is_named(text, monkeypatch):
    def denied(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    text({"a.txt": "text\n" * 50})
    monkeypatch.setattr("pathlib.Path.open", denied)  # file modes do not stop root
    with pytest.raises(UserError, match=r"a.txt cannot be read \(Permission denied\)"):
        text({})


def test_hash_of_a_large_file_is_kept_until_it_changes(text, tmp_path, monkeypatch, prose):
    monkeypatch.setattr("src.data.common.files.DIGEST_MEMO", 100)
    files = {"a.txt": prose(5000)}
    first = text(files).fingerprint
    path = tmp_path / "corpus" / "a.txt"
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    module = text_module.Text(text_module.Text.Config(path=[str(path)], cache_dir=str(tmp_path / "cache")))
    assert module.fingerprint == first
    monkeypatch.undo()
    path.write_text("other " * 1000)
    module = text_module.Text(text_module.Text.Config(path=[str(path)], cache_dir=str(tmp_path / "cache")))
    assert module.fingerprint != first
