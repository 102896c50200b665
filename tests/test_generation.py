import random
import statistics
import time

import pytest
import torch

from src.config import compose
from src.errors import UserError
from src.generation import Sampling, Timing, generate, generate_rows, probabilities, stream_text
from src.model import LanguageModel
from src.pieces import prefill
from src.registry import MIXERS

VOCAB = 16


@pytest.fixture
def model(seed):
    cfg = compose(["mixer=loglinear_gdn", "data=mqar", "model.d_model=16", "model.n_layers=1"])
    return LanguageModel(cfg.model, cfg.mixer, VOCAB, 32).eval()


LOGITS = torch.tensor([0.5, 0.2, 0.25, 0.05]).log()


def test_temperature():
    torch.testing.assert_close(probabilities(LOGITS, Sampling()), LOGITS.exp())
    hot = probabilities(LOGITS, Sampling(temperature=2.0))
    torch.testing.assert_close(hot, (LOGITS / 2).softmax(-1))
    assert probabilities(LOGITS, Sampling(temperature=0)).tolist() == [1, 0, 0, 0]
    assert probabilities(LOGITS, Sampling(temperature=1e-30)).tolist() == [1, 0, 0, 0]


def test_top_k():
    assert probabilities(LOGITS, Sampling(top_k=2)).tolist() == pytest.approx([2 / 3, 0, 1 / 3, 0])
    assert probabilities(LOGITS, Sampling(top_k=99)).tolist() == pytest.approx([0.5, 0.2, 0.25, 0.05])


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    assert probabilities(LOGITS, Sampling(top_p=0.7)).tolist() == pytest.approx([2 / 3, 0, 1 / 3, 0])
    assert probabilities(LOGITS, Sampling(top_p=0.8)).tolist() == pytest.approx([50 / 95, 20 / 95, 25 / 95, 0])
    assert probabilities(LOGITS, Sampling(top_p=0)).tolist() == [1, 0, 0, 0]
    both = probabilities(LOGITS, Sampling(top_k=2, top_p=0.6))  # 2/3 of what top-k has left
    assert both.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 1.5}, {"top_p": -0.1}])
def test_impossible_sampling_is_named(wrong):
    with pytest.raises(UserError, match=rf"^{next(iter(wrong))}="):
        Sampling(**wrong)


def test_greedy_generation_equals_the_argmax_of_whole_sequences(model):
    prompt = torch.randint(VOCAB, (70,)).tolist()
    new = list(generate(model, prompt, 6, Sampling(temperature=0)))
    whole = torch.tensor([prompt + new])
    expected = model(whole)[0, len(prompt) - 1 : -1].argmax(-1)
    assert new == expected.tolist()


def test_seed_decides_the_draws(model):
    a, b, c = (list(generate(model, [1], 20, Sampling(), seed=seed)) for seed in (1, 1, 2))
    assert a == b != c


def test_stop_token_ends_and_is_not_given(model):
    whole = list(generate(model, [1], 20, Sampling(), seed=3))
    stop = whole[5]
    cut = list(generate(model, [1], 20, Sampling(), seed=3, stop=stop))
    assert cut == whole[: whole.index(stop)]


def test_timing(model):
    timing = Timing()
    new = list(generate(model, [1] * 9, 4, Sampling(), timing=timing))
    assert (timing.prompt_tokens, timing.new_tokens) == (9, len(new))
    assert timing.prefill_seconds > 0
    assert timing.step_seconds > 0
    state = model.step(torch.tensor([[1] * 9 + new[:-1]]))[1]  # the last token need not be read
    assert timing.state_bytes == state.num_bytes
    assert timing.positions == 9 + 3


def test_state_has_room_for_the_new_tokens(model, monkeypatch):
    states = []
    step = LanguageModel.step
    monkeypatch.setattr(
        LanguageModel, "step", lambda self, ids, state=None, **a: states.append(state) or step(self, ids, state, **a)
    )
    list(generate(model, [1] * 60, 70, Sampling()))
    memory = states[0].layers[0]["memory"]  # what the first new token meets
    assert memory.in_place
    assert memory.max_position == 60 + 70


@pytest.mark.parametrize("mixer", ["loglinear_gdn", "loglinear_mamba2", "softmax", "hybrid"])
def test_rows_give_what_their_prompts_give_alone(mixer, seed):
    """Prompts of several lengths, rows that end at different times, a caller that ends one."""
    cfg = compose([f"mixer={mixer}", "data=mqar", "model.d_model=16", "model.n_layers=2"])
    model = LanguageModel(cfg.model, cfg.mixer, VOCAB, 32).double().eval()
    prompts = [torch.randint(VOCAB, (n,)).tolist() for n in (1, 70, 3, 3, 130)]
    alone = [list(generate(model, prompt, 80, Sampling(), seed=seed)) for prompt in prompts]
    stop, cut, ended = alone[1][20], 7, set()
    timing = Timing()
    rows = [[] for _ in prompts]
    for row, token in generate_rows(
        model, prompts, 80, Sampling(), seed=seed, stop=stop, ended=ended, piece=50, timing=timing
    ):
        assert None not in rows[row]
        rows[row].append(token)
        if row == 2 and len(rows[row]) == cut:
            ended.add(row)
    expected = [[*ids[: ids.index(stop)], None] if stop in ids else ids for ids in alone]
    expected[2] = expected[2][:cut]
    assert rows == expected
    read = [len(p) + len(ids) - (ids[-1] is not None) - (None in ids) for p, ids in zip(prompts, rows, strict=True)]
    assert timing.positions == sum(read)
    assert timing.state_bytes == sum(model.state_bytes(n, torch.float64) for n in read)
    assert timing.new_tokens == sum(len(ids) - (None in ids) for ids in rows)
    assert sum(n for n, _ in timing.steps) == sum(read) - sum(map(len, prompts))


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["mamba2", "gated_deltanet", "loglinear_mamba2", "loglinear_gdn"])
def test_late_tokens_take_no_longer_than_early_ones(mixer):
    """At the default width, behind 65,200 tokens (whose chunk reads most levels) and behind 100."""
    cfg = compose([f"mixer={mixer}"])
    model = LanguageModel(cfg.model, cfg.mixer, 512, 512).eval()
    seconds = {}
    with torch.inference_mode():
        states = {n: prefill(model, [torch.randint(512, (n,))], 4096)[1].for_decoding(300) for n in (100, 65_200)}
        for _ in range(150):  # in turns, so that what else the machine does meets both
            for n, state in states.items():
                start = time.thread_time()
                _, states[n] = model.step(torch.tensor([[1]]), state)
                seconds.setdefault(n, []).append(time.thread_time() - start)
    early, late = (statistics.median(times) for times in seconds.values())
    print(f"{mixer}: {1e3 * early:.2f} ms, {1e3 * late:.2f} ms")
    assert late < 1.3 * early


def test_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="prompt"):
        next(generate(model, [], 1, Sampling()))


def test_streamed_text_waits_for_whole_characters():
    text = "aé€😀b"
    pieces = list(stream_text(iter(text.encode()), lambda ids: bytes(ids).decode(errors="replace")))
    assert "".join(pieces) == text
    assert pieces == ["a", "é", "€", "😀", "b"]
    broken = list(stream_text(iter(b"a\xf0\x9f"), lambda ids: bytes(ids).decode(errors="replace")))
    assert "".join(broken) == "a\ufffd"


def test_streamed_text_is_the_whole_text_whatever_the_bytes(seed):
    rng = random.Random(seed)
    parts = [*(c.encode() for c in "ab é€😀\ufffd"), b"\xf0", b"\x9f", b"\x98", b"\xff"]
    for _ in range(200):
        whole = b"".join(rng.choice(parts[:7]) for _ in range(30))
        decode = lambda ids: bytes(ids).decode(errors="replace")  # noqa: E731
        assert "".join(stream_text(iter(whole), decode)) == whole.decode()
        any_bytes = b"".join(rng.choice(parts) for _ in range(12))
        list(stream_text(iter(any_bytes), decode))  # ends


def test_streaming_decodes_a_bounded_number_of_tokens():
    longest = 0

    def decode(ids):
        """As SentencePiece does: a word's blank is left out where a text begins."""
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join(f" {i}" for i in ids).removeprefix(" ")

    pieces = list(stream_text(iter(range(100)), decode))
    assert pieces[:3] == ["0", " 1", " 2"]
    assert "".join(pieces) == " ".join(map(str, range(100)))
    assert longest == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXERS.names())
def test_rows_that_end_leave_the_others_as_they_are_on_the_gpu(name, seed):
    """Rows are dropped out of states that are overwritten in place, at chunk borders and between them."""
    cfg = compose([f"mixer={name}", "data=mqar", "model.d_model=64", "model.n_layers=2"])
    model = LanguageModel(cfg.model, cfg.mixer, VOCAB, 32).cuda().eval()
    prompts = [torch.randint(VOCAB, (n,)).tolist() for n in (3, 63, 64, 130)]
    alone = [list(generate(model, prompt, 90, Sampling(temperature=0))) for prompt in prompts]
    leaves = {0: 20, 2: 1, 3: 65}  # row: tokens after which the caller has enough of it
    ended: set[int] = set()
    rows: list[list[int]] = [[] for _ in prompts]
    for row, token in generate_rows(model, prompts, 90, Sampling(temperature=0), ended=ended):
        rows[row].append(token)
        if len(rows[row]) == leaves.get(row):
            ended.add(row)
    for row, ids in enumerate(rows):
        assert ids == alone[row][: leaves.get(row, 90)], row
