"""The CPU ops against float64, and that a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import Drawing, PackedLinear, load_ops
from kernels.cpu.build import LOCKED_WITHIN_S, remove_abandoned
from tests.kernels.trees import ancestor_words, attention_by_definition, chain_of, parents

pytestmark = pytest.mark.skipif(load_ops() is not None, reason=f"no CPU ops: {load_ops()}")

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
dtypes = st.sampled_from(list(DTYPES))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 20) | st.integers(21, 70),
    st.integers(1, 200),
    st.integers(1, 70) | st.sampled_from([16, 32, 48, 96]),  # whole tiles of inputs
    st.booleans(),
    dtypes,
    st.integers(0, 1000),
)
def test_a_packed_layer_multiplies_as_float64_does_and_each_row_as_if_alone(
    rows: int, outputs: int, pairs: int, biased: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    layer = torch.nn.Linear(2 * pairs, outputs, bias=biased, dtype=dtype).requires_grad_(False)
    x = torch.randn(rows, 2 * pairs, dtype=dtype)
    packed = PackedLinear(layer)
    out = packed(x)
    exact = torch.nn.functional.linear(
        x.double(), layer.weight.double(), layer.bias.double() if biased else None
    )
    torch.testing.assert_close(out.double(), exact, rtol=DTYPES[dtype], atol=DTYPES[dtype])
    assert all(torch.equal(packed(x[i : i + 1])[0], out[i]) for i in range(rows))
    assert torch.equal(packed(x[None, :, :])[0], out)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 20),
    st.integers(1, 200),
    st.integers(1, 70) | st.sampled_from([1024, 1025, 2500]),  # beyond what 32 bits can sum at once
    st.booleans(),
    dtypes,
    st.booleans(),
    st.integers(0, 1000),
)
def test_a_layer_in_8_bits_is_near_and_each_of_few_rows_as_if_alone(
    rows: int, outputs: int, pairs: int, biased: bool, dtype: torch.dtype, largest: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    width = 2 * pairs
    weight, x = torch.randn(outputs, width), torch.randn(rows, width).to(dtype)
    if largest:  # all words are as large as can be
        weight, x = weight.sign() * weight.abs().amax(-1, True), x.sign() * x.abs().amax(-1, True)
        weight[0], x[0] = weight[0].abs(), x[0].abs()
    bias = torch.randn(outputs).to(dtype) if biased else None
    packed = torch.ops.eagle_cpu.pack_coarsely(weight)
    out = torch.ops.eagle_cpu.coarse_linear(x, packed, bias, outputs)
    w, given = weight.double(), x.double()
    exact = torch.nn.functional.linear(given, w, bias.double() if bias is not None else None)
    # Half a step of each weight, and of each input; then the result is rounded.
    near = given.abs().sum(-1, True) * (w.abs().amax(-1) / 254) * 1.01
    near += given.abs().amax(-1, True) / 16382 * w.abs().sum(-1) * 1.01
    assert ((out.double() - exact).abs() <= near + DTYPES[dtype] * exact.abs() + 1e-6).all()
    few = torch.ops.eagle_cpu.coarse_linear(x[:8], packed, bias, outputs)
    alone = [torch.ops.eagle_cpu.coarse_linear(row[None], packed, bias, outputs)[0] for row in x[:8]]
    assert torch.equal(torch.stack(alone), few)


def test_in_8_bits_what_is_no_number_stays_none_and_nothing_is_nothing() -> None:
    weight, x = torch.randn(70, 64), torch.randn(4, 64)
    weight[3, 5], weight[4, 1], weight[5] = torch.nan, torch.inf, 0
    x[1, 7], x[2, 0], x[3] = torch.nan, -torch.inf, 0
    out = torch.ops.eagle_cpu.coarse_linear(x, torch.ops.eagle_cpu.pack_coarsely(weight), None, 70)
    assert out[1:3].isnan().all()
    assert out[:, 3:5].isnan().all()
    assert out[0, [*range(3), *range(6, 70)]].isfinite().all()
    assert (out[0, 5], out[3, 0]) == (0, 0)
    large = torch.full((1, 64), 1e37)  # whose sum is no float
    assert (
        torch.ops.eagle_cpu.coarse_linear(large, torch.ops.eagle_cpu.pack_coarsely(large * 1e-38), None, 1)
        > 6e37
    )
    packed = torch.ops.eagle_cpu.pack_coarsely(weight)
    for inputs, bias, reason in (
        (x[:, :32], None, "do not fit weights"),
        (x.double(), None, "inputs are rows of"),
        (x, torch.zeros(3), "no such bias"),
        (x, torch.zeros(70, dtype=torch.bfloat16), "no such bias"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            torch.ops.eagle_cpu.coarse_linear(inputs, packed, bias, 70)


@settings(deadline=None, max_examples=60)
@given(
    parents(12) | parents(64) | st.just([[-1, *range(63)]]),  # a word of all 64 bits
    st.sampled_from([0, 1]) | st.integers(2, 40) | st.integers(41, 110),
    st.sampled_from([(1, 1), (3, 1), (6, 2), (7, 1), (8, 4), (10, 2), (16, 1), (17, 1)]),
    st.sampled_from([8, 20, 32, 64, 80, 96, 112, 128, 160, 256]),
    st.sampled_from([None, 1, 3, 16, 40]),
    st.sampled_from([None, 2.0]),
    dtypes,
    st.integers(0, 1000),
)
def test_attention_over_slots_is_what_each_node_may_see(
    trees: list[list[int]],
    length: int,
    heads: tuple[int, int],
    size: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    (tree,) = trees
    nodes, (query_heads, kv_heads), slot, layer = len(tree), heads, 1, 2
    data = torch.randn(2, 3, 2, kv_heads, length + nodes + 3, size, dtype=dtype)
    q = torch.randn(1, query_heads, nodes, size, dtype=dtype)
    k, v = torch.randn(2, 1, kv_heads, nodes, size, dtype=dtype)
    where = torch.tensor([data[0].data_ptr(), data[1].data_ptr(), *data.stride()[1:4]])
    words = ancestor_words(trees)[0].tolist()
    places = torch.tensor(
        [
            [-1 if parent == -2 else slot, length + i, length, word]
            for i, (parent, word) in enumerate(zip(tree, words, strict=True))
        ]
    )

    def attend(q, k, v, places):
        scale, cap = size**-0.5, softcap or 0.0
        return torch.ops.eagle_cpu.attend(q, k, v, places, where, layer, scale, window or 0, cap)

    before = data.clone()
    out = attend(q, k, v, places)
    real = [i for i, parent in enumerate(tree) if parent != -2]
    before[0, layer, slot, :, length : length + len(real)] = k[0][:, real]
    before[1, layer, slot, :, length : length + len(real)] = v[0][:, real]
    assert torch.equal(data, before)  # stored there and nowhere else, padding not at all
    keys, values = data[0, layer], data[1, layer]
    exact = attention_by_definition(q, keys, values, [slot], [length], trees, size**-0.5, window, softcap)
    expected = exact[0].transpose(0, 1)[real]
    torch.testing.assert_close(out[0, real].double(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])
    for i in real:
        alone = slice(i, i + 1)
        assert torch.equal(
            attend(q[:, :, alone], k[:, :, alone], v[:, :, alone], places[alone])[0, 0], out[0, i]
        )


@settings(deadline=None, max_examples=60)
@given(
    parents(30) | st.just([[-1, *range(63)]]),
    st.integers(0, 110) | st.sampled_from([31, 32, 33, 64]),
    st.sampled_from([(1, 1), (3, 1), (4, 2), (12, 1)]),
    st.sampled_from([20, 32, 64, 96]),
    st.sampled_from([0, 1, 5, 33, 70]),
    dtypes,
    st.integers(0, 1000),
)
def test_a_path_of_a_tree_has_the_bits_of_its_tokens_one_after_another(
    trees: list[list[int]],
    length: int,
    heads: tuple[int, int],
    size: int,
    window: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    tree = [parent for parent in trees[0] if parent != -2]
    path = chain_of(tree, seed % len(tree))[::-1]
    data = torch.randn(2, 1, 1, heads[1], length + len(tree), size, dtype=dtype)
    q = torch.randn(1, heads[0], len(tree), size, dtype=dtype)
    k, v = torch.randn(2, 1, heads[1], len(tree), size, dtype=dtype)
    words = ancestor_words([tree])[0].tolist()
    results = []
    for rows, places in (
        ([*range(len(tree))], [[0, length + i, length, word] for i, word in enumerate(words)]),
        (path, [[0, length + depth, length + depth, 1] for depth in range(len(path))]),
        *(([node], [[0, length + depth, length + depth, 1]]) for depth, node in enumerate(path)),
    ):
        where = torch.tensor([data[0].data_ptr(), data[1].data_ptr(), *data.stride()[1:4]])
        out = torch.ops.eagle_cpu.attend(
            q[:, :, rows], k[:, :, rows], v[:, :, rows], torch.tensor(places), where, 0, 0.125, window, 0.0
        )
        results.append(out[0])
    assert torch.equal(results[0][path], results[1])
    assert torch.equal(results[1], torch.cat(results[2:]))


@settings(deadline=None, max_examples=60)
@given(
    parents(20),
    st.integers(0, 80),
    st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    st.sampled_from([20, 64, 96]),
    st.sampled_from([0, 1, 5, 33]),
    st.sampled_from([float("inf"), float("nan")]),
    dtypes,
    st.integers(0, 1000),
)
def test_what_is_no_number_concerns_those_that_see_it(
    trees: list[list[int]],
    length: int,
    heads: tuple[int, int],
    size: int,
    window: int,
    fault: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    tree = [parent for parent in trees[0] if parent != -2]
    nodes, row, which = len(tree), seed % (length + len(tree)), seed % 2
    data = torch.randn(2, 1, 1, heads[1], length + nodes, size, dtype=dtype)
    q = torch.randn(1, heads[0], nodes, size, dtype=dtype)
    k, v = torch.randn(2, 1, heads[1], nodes, size, dtype=dtype)
    places = torch.tensor(
        [[0, length + i, length, word] for i, word in enumerate(ancestor_words([tree])[0].tolist())]
    )
    where = torch.tensor([data[0].data_ptr(), data[1].data_ptr(), *data.stride()[1:4]])

    def attend() -> torch.Tensor:
        return torch.ops.eagle_cpu.attend(q, k, v, places, where, 0, 0.125, window, 0.0)[0]

    sound = attend()
    if row < length:
        data[which, :, :, :, row, 0] = fault
    else:
        (k, v)[which][0, :, row - length, 0] = fault
    faulty = attend()
    for i in range(nodes):
        chain = chain_of(tree, i)
        position = length + len(chain) - 1
        at = row if row < length else position - chain.index(row - length) if row - length in chain else None
        if at is None or (window and at <= position - window):
            assert torch.equal(faulty[i], sound[i])


def test_without_a_compiler_or_switched_off_decoding_goes_on_with_torch(tiny_path: str, tmp_path) -> None:
    code = (
        "import sys; from stages.decoding import EagleModel, SamplingParams;"
        "model = EagleModel.from_pretrained(sys.argv[1], device='cpu', dtype='float32');"
        "assert model.target.cpu is None;"
        "print(model.generate([1, 2, 3], SamplingParams(max_new_tokens=5)).token_ids)"
    )
    outputs = []
    for switch in ({"CXX": "/no/such/compiler"}, {"EAGLE_CPU_OPS": "off"}):
        env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path), **switch}
        done = subprocess.run(
            [sys.executable, "-c", code, tiny_path], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "CPU ops" in done.stderr  # says that it could be faster, and why it is not
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1] != ""


def test_what_a_killed_compilation_left_goes_and_one_under_way_stays(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\ncase $1 in --version) echo 1;; *) exec sleep 60;; esac\n")
    compiler.chmod(0o755)
    environment = os.environ | {"CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    script = "from kernels.cpu import load_ops; load_ops()"
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, start_new_session=True)
        for _ in range(2)
    ]
    try:
        while len(left := set(tmp_path.glob("eagle/tmp*"))) < len(processes):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        processes[0].kill()
        processes[0].wait()
        begun = time.time() - 2 * LOCKED_WITHIN_S
        for folder in left:
            os.utime(folder, (begun, begun))
        new = Path(tempfile.mkdtemp(dir=tmp_path / "eagle"))
        remove_abandoned(tmp_path / "eagle")
        stay = set(tmp_path.glob("eagle/tmp*"))
        assert len(stay & left) == 1
        assert stay - left == {new}
        assert processes[1].poll() is None
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_no_rows_and_rows_of_another_width() -> None:
    layer = PackedLinear(torch.nn.Linear(64, 1000))
    assert layer(torch.empty(0, 64)).shape == (0, 1000)
    assert layer.draw(torch.empty(0, 64), Drawing(), []) == []
    assert layer.draw(torch.empty(0, 64), Drawing([1.0], [0], [0]), []) == []
    for wrong in (torch.empty(2, 32), torch.empty(2, 66), torch.empty(2, 64, dtype=torch.bfloat16)):
        for use in (layer, lambda x: layer.draw(x, Drawing(), [0, 1])):
            with pytest.raises(RuntimeError, match="do not fit weights"):
                use(wrong)
