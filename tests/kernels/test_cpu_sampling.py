"""The CPU ops that draw the target's tokens and rank a drafter's, against what they stand for in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels.accept
import kernels.filters
from kernels import Filters, draw_tokens, filter_floor, first_argmax, gumbel_noise
from kernels.cpu import load_ops
from tests.kernels.trees import strange_logits

pytestmark = pytest.mark.skipif(load_ops() is not None, reason=f"no CPU ops: {load_ops()}")

OPS = torch.ops.eagle_cpu
dtypes = st.sampled_from([torch.float32, torch.bfloat16])


some_filters = st.tuples(
    st.sampled_from([0, 1, 2, 50, 3000, 10**6]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 1e-6]),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)


def drawn(
    logits: Tensor,
    keys: tuple[Tensor, Tensor, Tensor, Tensor],
    filters: Filters | None = None,
    *,
    by_op: bool = True,
) -> Tensor:
    """Tokens [M] of logits [M, V]; keys: temperature, seed, sample, position."""
    temperature, seed, sample, position = keys
    with pytest.MonkeyPatch.context() as patch:
        if not by_op:
            for module in (kernels.accept, kernels.filters):
                patch.setattr(module, "ops_loaded", lambda: False)
        return draw_tokens(logits, position, temperature, seed, sample, filters=filters)


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 6),
    st.sampled_from([1, 3, 64, 65, 500, 4099, 20000]),
    st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0, 1.5]), min_size=6, max_size=6),
    st.sampled_from([0.0, 0.3, 3.0, 20.0]),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 0.99]),
    dtypes,
    st.integers(0, 10**6),
)
def test_tokens_are_drawn_as_torch_draws_them(
    rows: int,
    vocab: int,
    temperatures: list[float],
    spread: float,
    shared: bool,
    ruled_out: float,
    dtype: torch.dtype,
    case: int,
) -> None:
    generator = torch.Generator().manual_seed(case)
    logits = spread * torch.randn(rows, vocab, generator=generator)
    masked = torch.rand(rows, vocab, generator=generator) < ruled_out
    masked[:, case % vocab] = False
    logits = logits.masked_fill(masked, -torch.inf).to(dtype)
    seed = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    sample, position = torch.randint(0, 2**40, (2, rows), generator=generator)
    if shared:  # nodes of one tree: some stand at the same position
        seed, sample, position = seed[:1].expand(rows), sample[:1].expand(rows), position % 2
    keys = torch.tensor(temperatures[:rows]), seed, sample, position
    found = drawn(logits, keys)
    assert torch.equal(found, drawn(logits, keys, by_op=False))
    assert all(
        torch.equal(drawn(logits[i, None], tuple(k[i, None] for k in keys))[0], found[i]) for i in range(rows)
    )


@settings(deadline=None, max_examples=150)
@given(
    strange_logits(4, [1, 16, 65, 700, 5000]),
    st.lists(st.sampled_from([0.0, 0.05, 1.0]), min_size=4, max_size=4),
    st.none() | st.lists(some_filters, min_size=4, max_size=4),
    dtypes,
)
def test_nan_and_infinite_logits_are_drawn_from_as_torch_draws(
    logits: Tensor,
    temperatures: list[float],
    asked: list[tuple[int, float, float]] | None,
    dtype: torch.dtype,
) -> None:
    logits = logits.to(dtype)
    keys = torch.tensor(temperatures), torch.arange(4), torch.arange(4), torch.arange(4)
    filters = asked and Filters(*map(torch.tensor, zip(*asked, strict=True)))
    assert torch.equal(drawn(logits, keys, filters), drawn(logits, keys, filters, by_op=False))
    left = logits.masked_fill(logits.isnan(), -torch.inf)
    assert torch.equal(OPS.argmax(logits), left.argmax(-1))
    if filters:
        floor = filter_floor(logits[:, None], keys[0], filters)
        assert torch.equal(floor, kernels.filters.filter_floor_torch(logits[:, None], keys[0], filters))
    # Children without an order are still some tokens, each once.
    width, pool = min(8, logits.shape[1]), min(32, logits.shape[1])
    lists = [tensor.tolist() for tensor in keys[1:]]
    best = OPS.rank(logits, torch.arange(logits.shape[1]), temperatures, [0.5] * 4, *lists, pool, width)[0]
    assert all(len(set(row)) == width and set(row) <= set(range(logits.shape[1])) for row in best.tolist())


def test_nan_hides_no_token_that_is_read_beside_it() -> None:
    logits = torch.full((1, 64), torch.nan)
    logits[:, :16] = 0.0
    for position in range(30):
        keys = torch.tensor([1.0]), torch.tensor([7]), torch.tensor([0]), torch.tensor([position])
        best = gumbel_noise(*keys[1:], torch.arange(16)[None]).argmax(-1)
        assert torch.equal(drawn(logits, keys), best)


def test_two_tokens_that_only_rounding_tells_apart_are_left_to_it() -> None:
    """What torch makes of its own logarithms is then the outcome, on any machine."""
    seed, sample = torch.tensor([5]), torch.tensor([0])
    left_to_it = 0
    for position in range(1, 60):
        at = torch.tensor([position])
        noise = gumbel_noise(seed, sample, at, torch.arange(300)[None])
        logits = torch.full((1, 300), -20.0)
        # The scores of three tokens are the same, but for the last bits.
        chosen = torch.tensor([7, 120, 299])
        logits[0, chosen] = 3.0 - noise[0, chosen]
        keys = torch.tensor([1.0]), seed, sample, at
        assert torch.equal(drawn(logits, keys), drawn(logits, keys, by_op=False))
        left_to_it += int(OPS.draw(logits, *keys)) == -1
        logits[0, 120] += 1e-3  # and now they are not
        assert int(OPS.draw(logits, *keys)) == 120
    assert left_to_it == 59


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([1, 3, 64, 500, 4099, 20000]),
    st.lists(some_filters, min_size=4, max_size=4),
    st.lists(st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.9]), min_size=4, max_size=4),
    st.sampled_from([0.0, 0.3, 3.0, 20.0]),
    st.sampled_from([None, 2, 8]),
    st.sampled_from([0.0, 0.5, 0.99]),
    dtypes,
    st.integers(0, 10**6),
)
def test_rows_are_filtered_as_torch_filters_them(
    vocab: int,
    asked: list[tuple[int, float, float]],
    temperatures: list[float],
    spread: float,
    steps: int | None,
    ruled_out: float,
    dtype: torch.dtype,
    case: int,
) -> None:
    """Bit for bit, and so are the tokens drawn: few values (``steps``) make many ties."""
    rows = len(asked)
    generator = torch.Generator().manual_seed(case)
    logits = spread * torch.randn(rows, vocab, generator=generator)
    logits = logits if steps is None else (logits * steps).round() / steps
    masked = torch.rand(rows, vocab, generator=generator) < ruled_out
    masked[:, case % vocab] = False
    logits = logits.masked_fill(masked, -torch.inf).to(dtype)
    top_k, top_p, min_p = map(torch.tensor, zip(*asked, strict=True))
    filters, heat = Filters(top_k, top_p, min_p), torch.tensor(temperatures)
    floor = filter_floor(logits[:, None], heat, filters)
    assert torch.equal(floor, kernels.filters.filter_floor_torch(logits[:, None], heat, filters))
    keys = heat, torch.full((rows,), case), torch.arange(rows), torch.arange(rows) + 1
    assert torch.equal(drawn(logits, keys, filters), drawn(logits, keys, filters, by_op=False))


def test_a_nucleus_that_only_rounding_bounds_is_left_to_it() -> None:
    """Half of the mass lies on one of two tokens, so that top-p 0.5 keeps one or both."""
    logits = torch.tensor([[1.0, 1.0, *[-200.0] * 30]])
    logits[0, 1] = torch.nextafter(logits[0, 0], torch.tensor(0.0))
    heat, k, p = torch.tensor([1.0]), torch.tensor([0]), torch.tensor([0.5])
    least = torch.tensor([-torch.inf])
    assert OPS.filter_floor(logits, heat, k, p, least) == 1.0  # by 2^-24 of the mass, which double tells
    logits[0, 1] = 1.0
    # The first of two equal halves ends where the second begins.
    assert OPS.filter_floor(logits, heat, k, p, least).isnan()
    filters = Filters(k, p, torch.tensor([0.0]))
    assert filter_floor(logits[:, None], heat, filters) == 1.0


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 4),
    st.sampled_from([1, 5, 100, 128, 1000]),
    st.integers(1, 8),
    st.lists(st.sampled_from([0.0, 0.4, 1.0]), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4),
    st.integers(0, 10**6),
)
def test_children_are_ranked_by_score_and_noise(
    rows: int, vocab: int, width: int, temperatures: list[float], strengths: list[float], case: int
) -> None:
    torch.manual_seed(case)
    width, pool = min(width, vocab), min(32, vocab)
    pool = max(pool, width)
    logits = 3 * torch.randn(rows, vocab)
    ids = torch.randperm(5000)[:vocab].sort().values
    keys = torch.randint(0, 2**31, (rows, 3))
    heat, strength = torch.tensor(temperatures[:rows]), torch.tensor(strengths[:rows])
    tokens, scores, pooled, log_probs, noise = OPS.rank(
        logits, ids, heat.tolist(), strength.tolist(), *keys.T.tolist(), pool, width
    )
    for row in range(rows):
        q = (logits[row] / (heat[row] or 1.0)).double().log_softmax(-1)
        best = q.topk(pool)
        if heat[row] == 0:
            expected, chosen = q.topk(width)
        else:
            given_noise = gumbel_noise(*keys[row], ids[best.indices])
            assert torch.equal(pooled[row], ids[best.indices])
            torch.testing.assert_close(log_probs[row].double(), best.values, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(noise[row], given_noise, rtol=1e-5, atol=1e-5)
            noisy = best.values + strength[row] * given_noise
            outside = (1 - best.values.exp().sum()).clamp(min=1e-9).log()
            outside = outside + torch.lgamma(1 - strength[row].double().clamp(max=0.9))
            ranked = (noisy - torch.logaddexp(noisy.logsumexp(-1), outside)).topk(width)
            expected, chosen = ranked.values, best.indices[ranked.indices]
        # Where nothing is left outside, how much is a matter of rounding.
        loose = 1e-4 if pool < vocab else 1e-2
        torch.testing.assert_close(scores[row].double(), expected, rtol=loose, atol=loose)
        assert tokens[row].tolist() == ids[chosen].tolist()


@pytest.mark.parametrize("size", [1, 16, 40, 128])
def test_likelihoods_of_strengths_are_log_softmaxes(size: int) -> None:
    torch.manual_seed(size)
    log_probs, noise = (3 * torch.randn(size)).log_softmax(-1), torch.randn(size)
    strengths, factors = (0.0, 0.5, 1.0), (1.0, 2.5)
    found = OPS.likelihoods(log_probs, noise, size - 1, strengths, factors)
    for s, of_strength in zip(strengths, found, strict=True):
        for a, value in zip(factors, of_strength, strict=True):
            exact = (a * (log_probs.double() + s * noise.double())).log_softmax(-1)[-1]
            torch.testing.assert_close(value, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_greatest_output_of_a_layer_is_the_first_greatest_of_its_outputs(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    """With equal outputs in several places, NaN, and infinities."""
    rows, outputs = data.draw(st.integers(1, 17)), data.draw(st.sampled_from([1, 5, 64, 70, 300]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(rows, 8, generator=generator).to(dtype)
    weight = torch.randint(-1, 2, (outputs, 8), generator=generator).to(dtype)  # few kinds of rows
    bias = torch.zeros(outputs, dtype=dtype) if data.draw(st.booleans()) else None
    for odd in (torch.nan, torch.inf, -torch.inf):
        if bias is not None and data.draw(st.booleans()):
            bias[torch.randint(outputs, (2,), generator=generator)] = odd
    packed = OPS.pack(weight)
    found = OPS.linear_argmax(x, packed, bias, outputs)
    assert found == first_argmax(OPS.linear(x, packed, bias, outputs)).tolist()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=dtypes)
def test_what_is_drawn_of_a_layer_is_what_is_drawn_of_its_outputs(
    data: st.DataObject, dtype: torch.dtype
) -> None:
    rows, outputs = data.draw(st.integers(1, 17)), data.draw(st.sampled_from([1, 5, 64, 70, 3000]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    x, weight = (3 * torch.randn(n, 8, generator=generator).to(dtype) for n in (rows, outputs))
    bias = None
    if data.draw(st.booleans()):
        bias = torch.zeros(outputs, dtype=dtype)
        for odd in (torch.nan, torch.inf, -torch.inf):
            if data.draw(st.booleans()):
                bias[torch.randint(outputs, (2,), generator=generator)] = odd
    temperature = [data.draw(st.sampled_from([0.05, 0.7, 1.0, 3.0])) for _ in range(rows)]
    seed, sample, position = (
        torch.randint(-3, 3, (rows,), generator=generator) for _ in range(3)
    )  # some rows share theirs
    packed = OPS.pack(weight)
    found = OPS.linear_draw(
        x, packed, bias, outputs, temperature, seed.tolist(), sample.tolist(), position.tolist()
    )
    logits = OPS.linear(x, packed, bias, outputs)
    wanted = draw_tokens(logits, position, torch.tensor(temperature), seed, sample).tolist()
    noise = torch.stack(
        [gumbel_noise(seed[m], sample[m], position[m], torch.arange(outputs)) for m in range(rows)]
    )
    scores = logits.float() / torch.tensor(temperature)[:, None] + noise
    for ours, theirs, row in zip(found, wanted, scores, strict=True):
        if ours != theirs:
            assert ours == -1
            best = row.topk(min(2, outputs)).values
            assert not row.isfinite().all() or float(best[0] - best[-1]) < 1e-3
