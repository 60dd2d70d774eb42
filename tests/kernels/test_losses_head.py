"""The linear-head core: chunks, their boundaries, an order of rows, a second head."""

from __future__ import annotations

import pytest
import torch
from harness import make, verify

from liger_hw import registry
from liger_hw.backends import known_target
from liger_hw.kernels.embedding import row_sums, stable_sort
from liger_hw.kernels.heads import head_targets, linear_head
from liger_hw.kernels.heads.linear_head import (
    Chunks,
    HeadGradients,
    borrow_gradient_memory,
    divide,
    dx_of,
    gemm_columns,
    plan_chunks,
    sweep,
    sweep_in_fp32,
)
from liger_hw.registry import get_op
from liger_hw.runtime.launch import LaunchFailed

MANY = 140  # rows: chunks are whole multiples of 128


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 128 rows at most."""
    for name, value in {
        "MIN_ROWS": 64,
        "MAX_ROWS": 128,
        "MAX_CHUNKS": 100,
        "MAX_CHUNKS_WITH_TARGETS": 100,
        "MAX_ROWS_DIVERGENCE": 128,
    }.items():
        monkeypatch.setattr(linear_head, name, value)


@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize(
    "name, options",
    [
        ("fused_linear_cross_entropy", {"biased": True, "label_smoothing": 0.1}),
        ("fused_linear_cross_entropy", {"reduction": "none", "compact": True, "ignored": 0.4}),
        ("fused_linear_jsd", {"labelled": True}),
        ("fused_linear_kl_div", {"labelled": True}),
        ("fused_linear_log_probs", {"return_entropy": True, "select": 2}),
    ],
)
def test_over_several_chunks(lane, small_chunks, name, options, seed):
    op = get_op(name)
    verify(op, make(op, (MANY, 9, 19), torch.float32, lane.device, seed, options), seed)


# -- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("n_rows", [0, 1, 127, 1000, 8192, 65536])
@pytest.mark.parametrize("with_targets", [False, True])
@pytest.mark.parametrize("hidden", [256, 2304, 4096, 5120])
@pytest.mark.parametrize("itemsize, wide", [(2, False), (2, True), (4, False)])
def test_chunks_cover_the_rows_once(n_rows, hidden, with_targets, itemsize, wide):
    chunks = plan_chunks(n_rows, hidden, 131072, itemsize, wide=wide, with_targets=with_targets)
    starts, stops = [a for a, _ in chunks.bounds], [b for _, b in chunks.bounds]
    assert [0, *stops][: len(starts)] == starts and (not n_rows or stops[-1] == n_rows)
    assert all(a < b for a, b in chunks.bounds) and chunks.rows == max((b - a for a, b in chunks.bounds), default=0)
    most = linear_head.MAX_CHUNKS_WITH_TARGETS if with_targets else linear_head.MAX_CHUNKS
    assert itemsize != 2 or chunks.wide or len(chunks.bounds) <= most


@pytest.mark.cpu
@pytest.mark.parametrize("rows", [1024, 1100, 2047, 2900, 4096])
def test_chunks_of_equal_size_in_steps_of_256_rows(rows):
    for n_rows in (1, 255, 256, 1793, 4096, 5000, 8192, 65536):
        heights = [b - a for a, b in divide(n_rows, rows, linear_head.STEP)]
        assert sum(heights) == n_rows and 0 < min(heights) and max(heights) <= rows
        assert all(height % 256 == 0 for height in heights[:-1]) and max(heights[:-1], default=0) - min(heights) <= 511


MIB = 1 << 20


@pytest.mark.cpu
@pytest.mark.parametrize(
    "n_rows, vocab, options, heights, most",
    [
        (8192, 131072, {"with_targets": True}, (1280, 1280, 1280, 1280, 1024, 1024, 1024), 1408),
        (8192, 32768, {"with_targets": True}, (4096, 4096), 576),
        (32768, 1000, {"with_targets": True}, (32768,), 328),  # logits are smaller than the states' gradient
        (8192, 131072, {"scale": 2, "heads": 2}, (2048,) * 4, 2150),
        (4096, 131072, {"heads": 2, "prefer_large": True}, (1024,) * 4, 1638),
        (8192, 32768, {"heads": 2, "prefer_large": True}, (4096,) * 2, 832),
        (4096, 131072, {"prefer_large": True}, (4096,), 2080),
        (8192, 32768, {"prefer_large": True}, (8192,), 832),
    ],
)
def test_memory_of_the_heads_we_compare(n_rows, vocab, options, heights, most):
    """fused_linear_cross_entropy, JSD distillation, fused_linear_jsd and fused_linear_kl_div in bf16, hidden 4096:
    gradients and logits in MiB, of the order of what Liger 0.8.5 takes."""
    chunks = plan_chunks(n_rows, 4096, vocab, 2, **options)
    assert tuple(b - a for a, b in chunks.bounds) == heights
    logits = chunks.rows * vocab * 2 * options.get("heads", 1)
    assert (n_rows + vocab) * 4096 * 2 + logits <= most * MIB


@pytest.mark.cpu
@pytest.mark.parametrize(
    "n_rows, hidden, vocab, heights",
    [
        (4096, 4096, 131072, (2048, 1024, 1024)),
        (1000, 4096, 131072, (1000,)),
        (2048, 4096, 131072, (2048,)),
        (8192, 4096, 131072, (4096, 2048, 2048)),
        (4096, 2304, 256000, (2048, 1024, 1024)),
        (4096, 768, 50257, (4096,)),  # nothing lent: chunks of more rows than the gradient's memory has
    ],
)
def test_a_second_head_borrows_the_gradients_memory(n_rows, hidden, vocab, heights):
    """No more memory, and no more chunks, than with a buffer for each head."""
    before = plan_chunks(n_rows, hidden, vocab, 2, heads=2, prefer_large=True)
    chunks = borrow_gradient_memory(before, hidden, vocab)
    found = [b - a for a, b in chunks.bounds]
    assert tuple(found) == heights and [a for a, _ in chunks.bounds[1:]] == [b for _, b in chunks.bounds[:-1]]
    assert len(found) <= len(before.bounds)
    if chunks.borrowed:
        assert (
            found[0] * -(-vocab // 16) * 16 <= hidden * vocab
            and max(found[0], 2 * max(found[1:], default=0)) <= 2 * before.rows
        )
    else:
        assert chunks is before


@pytest.mark.cpu
def test_an_odd_vocabulary_is_multiplied_in_two_products():
    assert gemm_columns(50257, 2, 16) == [slice(50256, 50257), slice(0, 50256)]
    assert gemm_columns(4099, 4, 16) == [slice(4096, 4099), slice(0, 4096)]
    for vocab, alignment in ((50256, 16), (1023, 16), (50257, 1)):  # aligned, small, a library without a preference
        assert gemm_columns(vocab, 2, alignment) == [slice(0, vocab)]


@pytest.mark.cpu
@pytest.mark.parametrize("n_rows, mib", [(16384, 2950), (8192, 2000), (20000, 3000), (65536, 6000)])
def test_a_budget_has_the_frequent_targets_sums(set_env, n_rows, mib):
    """Gradients, one chunk's logits, the sums [n_rows / 16, hidden] fp32 and their columns of the chunk: within the
    budget."""
    set_env("LIGER_HW_LOSS_MEMORY_MIB", mib)
    chunks = plan_chunks(n_rows, 4096, 131072, 2, with_targets=True)
    slots = n_rows // head_targets.FREQUENT
    taken = (n_rows + 131072) * 4096 * 2 + slots * 4096 * 4 + chunks.rows * (131072 + slots) * 2
    assert taken <= mib * MIB and 1 < len(chunks.bounds) <= linear_head.MAX_CHUNKS_WITH_TARGETS and not chunks.wide


@pytest.mark.parametrize("dtype, teachers", [("float32", "float32"), ("float16", "float16"), ("float16", "float32")])
@pytest.mark.parametrize(
    "n_rows, hidden, vocab",
    [
        (60, 48, 37),  # borrowed: the first chunk lies in parts in the weight gradient's memory
        (60, 48, 48),
        (60, 9, 37),  # that memory is too small for a chunk
        (3, 5, 37),  # or, in 16 bits, has no row for both heads' fp32 logits
        (1, 2, 3),
    ],
)
def test_two_heads_in_fp32(lane, generator, monkeypatch, n_rows, hidden, vocab, dtype, teachers):
    """Logits, and the gradients of a slope of them, as fp64 has them, part by part."""
    monkeypatch.setattr(linear_head, "STEP", 4)
    monkeypatch.setattr(linear_head, "MIN_PART", 2)
    dtype, teachers = getattr(torch, dtype), getattr(torch, teachers)

    def draw(dtype, *shape):
        return torch.randn(shape, generator=generator, device=generator.device).to(lane.device, dtype)

    x, weight = draw(dtype, n_rows, hidden), draw(dtype, vocab, hidden)
    x2, weight2 = draw(teachers, n_rows, hidden + 2), draw(teachers, vocab, hidden + 2)
    exact, exact2 = x.double() @ weight.double().t(), x2.double() @ weight2.double().t()
    chunks = borrow_gradient_memory(Chunks([(i, min(i + 16, n_rows)) for i in range(0, n_rows, 16)]), hidden, vocab)
    grads, seen, borrowed = HeadGradients(x, weight, (True, True, False), chunks), [0], 0
    for start, logits, other, dlogits in sweep_in_fp32(chunks, x, weight, (x2, weight2), grads):
        stop = start + len(logits)
        assert logits.dtype == other.dtype == torch.float32 and dlogits.dtype == dtype and start == seen[-1]
        for found, wanted in ((logits, exact), (other, exact2)):
            torch.testing.assert_close(found.double(), wanted[start:stop], rtol=1e-5, atol=1e-5)
        for place in (logits, other):
            borrowed += 0 <= place.data_ptr() - grads.dweight.data_ptr() < grads.dweight.nbytes and len(place)
        dlogits.copy_(logits - other)
        seen.append(stop)
    assert seen[-1] == n_rows
    assert borrowed == (2 * chunks.bounds[0][1] if hidden == 48 or hidden == 5 and dtype is torch.float32 else 0)
    slope = exact - exact2
    for found, wanted in ((grads.dx, slope @ weight.double()), (grads.dweight, slope.t() @ x.double())):
        assert (found.double() - wanted).norm() <= 8 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.cpu
@pytest.mark.parametrize(
    "refusal",
    [
        NotImplementedError("Could not run 'aten::mm.dtype_out'"),
        RuntimeError("gemm input type at::BFloat16 and output type float is not supported for ROCm"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_products_where_torch_has_none_with_an_fp32_result(monkeypatch, generator, refusal, first):
    """The factors are converted, and torch is asked once; another error is not taken for a refusal."""
    monkeypatch.setattr(linear_head, "_fp32_result", {})
    monkeypatch.setattr(linear_head, "_FP32_SLICE", 3)
    a, b = (torch.randn(7, 7, generator=generator).to(torch.bfloat16) for _ in range(2))
    product, out, asked = torch.mm if first else torch.addmm, torch.ones(7, 7), []

    def refuses(*args, out_dtype=None, **options):
        asked.append(out_dtype)
        if out_dtype is not None:
            raise refusal
        return product(*args, **options)

    monkeypatch.setattr(torch, product.__name__, refuses)
    for _ in range(2):
        linear_head.add_product(out, a, b, first)
    assert asked.count(torch.float32) == 1
    torch.testing.assert_close(out, a.float() @ b.float() if first else 1 + 2 * (a.float() @ b.float()))
    monkeypatch.setattr(linear_head, "_fp32_result", {})
    refusal = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        linear_head.add_product(out, a, b, first)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "n_rows, hidden, vocab, parts",
    [
        (4096, 4096, 128256, [1024] * 2 + [256] * 8),
        (8192, 4096, 32000, [1024] * 8),
        (2048, 2048, 151936, [512] * 4),
        (4096, 768, 50257, [1024] * 4),
        (8192, 2304, 256000, [512] * 4 + [256] + [512] * 11 + [256]),
    ],
)
def test_fp32_logits_take_the_memory_of_rounded_ones(monkeypatch, n_rows, hidden, vocab, parts):
    """What both loops allocate for bf16 heads, at real sizes of tensors without memory."""
    x, weight = (torch.empty(n, hidden, dtype=torch.bfloat16, device="meta") for n in (n_rows, vocab))
    plain = plan_chunks(n_rows, hidden, vocab, 2, heads=2, prefer_large=True)
    chunks, taken, heights = borrow_gradient_memory(plain, hidden, vocab), [], []
    grads, empty = HeadGradients(x, weight, (True, True, False), chunks), torch.empty

    def counted(*args, **kwargs):
        made = empty(*args, **kwargs)
        taken[-1] += made.nbytes if made.dim() else 0
        return made

    monkeypatch.setattr(torch, "empty", counted)
    for name in ("logits_of", "add_product"):
        monkeypatch.setattr(linear_head, name, lambda *_: None)
    for loop in (
        sweep(plain, x, weight, grads, second=(x, weight)),
        sweep_in_fp32(chunks, x, weight, (x, weight), grads),
    ):
        taken.append(0)
        with registry.pretend(known_target("h200")):
            heights = [len(logits) for _, logits, *_ in loop]
    assert heights == parts and taken[0] == taken[1]


# -- the targets' entries, accumulated separately --------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 16, 37])
def test_targets_accumulated_separately(lane, generator, monkeypatch, vocab, dtype, ordered):
    """Any gradient, any columns: rare ones, frequent ones, out of the vocabulary; four chunks, against fp64."""
    if lane.name == "interpret" and dtype is torch.bfloat16:
        pytest.skip("the interpreter's bf16 is not right")
    monkeypatch.setattr(head_targets, "FREQUENT", 4)
    n_rows, hidden = 50, 9
    x, weight = (torch.randn(n, hidden, generator=generator).to(lane.device, dtype) for n in (n_rows, vocab))
    target = torch.randint(-1, vocab + 1, (n_rows,), generator=generator)
    target[:20] = torch.tensor([3, -100] * 10)  # one frequent for certain, one that is nowhere
    order = torch.randperm(n_rows, generator=generator)[:40] if ordered else torch.arange(n_rows)
    target, order = target.to(lane.device)[order.to(lane.device)], order.to(lane.device)
    given = (3 * torch.randn(len(order), vocab, generator=generator)).to(lane.device, dtype)
    chunks = Chunks([(0, 13), (13, 32), (32, 36), (36, len(order))])

    def once():
        grads = HeadGradients(x, weight, (True, True, True), chunks, target, lane.name == "cpu")
        for start, logits, _ in sweep(chunks, x, weight, grads, order=order if ordered else None):
            logits.copy_(given[start : start + logits.shape[0]])
        return grads.results()

    dx, dweight, dbias = once()
    wide, rows = given.double(), x.double()[order]
    torch.testing.assert_close(dx[order].double(), wide @ weight.double(), rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(dbias.double(), wide.sum(0), rtol=1e-2, atol=1e-2)
    expected = wide.t() @ rows
    assert (dweight.double() - expected).norm() < 2 * torch.finfo(dtype).eps * expected.norm()
    assert all(torch.equal(a, b) for a, b in zip((dx, dweight, dbias), once()))


@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("kernel", ["sort.", "take.", "bwd.", "join."])
def test_a_launch_of_the_targets_that_fails_is_repeated_alone(lane, generator, monkeypatch, kernel):
    """A head that exchanges between ranks must not begin again on one of them, and no sum may be added twice."""
    n_rows, hidden, vocab = 96, 9, 7
    x, weight, given = (  # small integers, whose sums are exact in any order: another configuration may have another
        torch.randint(-3, 4, shape, generator=generator).to(lane.device, torch.float16)
        for shape in ((n_rows, hidden), (vocab, hidden), (n_rows, vocab))
    )
    chunks = Chunks([(start, start + 24) for start in range(0, n_rows, 24)])
    target = torch.randint(vocab, (n_rows,), generator=generator).to(lane.device)
    monkeypatch.setattr(head_targets, "FREQUENT", n_rows + 1)  # every target is a rare one: all are summed at the end

    def once():
        grads = HeadGradients(x, weight, (False, True, False), chunks, target, False)
        for start, logits, _ in sweep(chunks, x, weight, grads):
            logits.copy_(given[start : start + logits.shape[0]])
        return grads.results()[1]

    expected, failed = once(), []
    for module in (head_targets, row_sums, stable_sort):
        real = module.launch

        def fails_once(plan, *args, real=real):
            if not failed and f"{plan.tunable.name}.".endswith(f".{kernel}"):
                failed.append(plan)
                raise LaunchFailed(plan, RuntimeError("out of resource"))
            return real(plan, *args)

        monkeypatch.setattr(module, "launch", fails_once)
    try:
        assert torch.equal(once(), expected) and failed
        assert failed[0].config.to_text() in str(registry.quarantined())
    finally:
        registry._failed.clear()
        registry.invalidate()


@pytest.mark.daily(head="trained", count="8", vocab="2047")  # what flat heads and other splits ask is less
@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("head", ["flat", "trained"])
@pytest.mark.parametrize("count, vocab", [(3, 2048), (8, 2048), (8, 2047)])
def test_chunks_are_as_good_as_one_gemm(lane, generator, head, count, vocab):
    """bf16, within 1.5 times. trained: the head follows the frequency of its targets, so that the sums of p * x and of
    the targets' entries nearly cancel: of eight chunks, all entries taken out, or the running sum alone, would miss it.
    Of three, the running sum alone does on an H200 and not on the CPU: not asked."""
    n_rows, hidden = 8192, 16
    frequency = 1 / torch.arange(1, vocab + 1).float()
    x, weight = (torch.randn(n, hidden, generator=generator) for n in (n_rows, vocab))
    weight *= hidden**-0.5 / 2
    if head == "trained":
        x[:, 0], weight[:, 0] = 1.0, frequency.log()
    x, weight = x.bfloat16(), weight.bfloat16()
    target = torch.randint(vocab, (n_rows,), generator=generator)
    if head == "trained":
        p = torch.softmax(x.float() @ weight.float().t(), -1)
        target = torch.multinomial(p, 1, generator=generator)[:, 0]
    x, weight, target = (t.to(lane.device) for t in (x, weight, target))
    at = torch.arange(n_rows, device=lane.device)

    def slopes(logits):
        p = torch.softmax(logits, -1)
        p[at, target] -= 1
        return p / n_rows

    exact = slopes(x.double() @ weight.double().t()).t() @ x.double()
    dlogits = slopes((x @ weight.t()).float()).bfloat16()
    found = []
    for targets in (None, target):
        edges = [n_rows * i // count for i in range(count + 1)]
        chunks = Chunks(list(zip(edges, edges[1:])))
        grads = HeadGradients(x, weight, (False, True, False), chunks, targets, lane.name == "cpu")
        assert (grads._entries is not None) == (targets is not None and count > 2)
        for start, logits, _ in sweep(chunks, x, weight, grads):
            logits.copy_(dlogits[start : start + logits.shape[0]])
        found.append(grads.results()[1])
    one = (dlogits.float().t() @ x.float()).bfloat16()
    plain, apart, base = (float((g.double() - exact).norm() / exact.norm()) for g in (*found, one))
    assert apart <= 1.5 * base, f"{apart} with targets, {plain} without, {base} of one GEMM"
    assert count == 3 or plain > 1.5 * base, f"{plain} without targets, {base} of one GEMM"


@pytest.mark.daily(vocab="2047")
@pytest.mark.lanes("cpu", "gpu")
@pytest.mark.parametrize("vocab", [2047, 50257])
def test_two_products_cost_the_states_gradient_little(lane, generator, vocab, monkeypatch):
    """bf16: the error of dx within 1.01 times that of the large product alone, which the other order exceeds for 2047
    words (of 50257 one word's share is less than a rounding: nothing may be lost there); for the rows whose target is
    among the unaligned words within 1.5 times that of one rounding."""
    monkeypatch.setattr(registry.backend_of(torch.device(lane.device)), "gemm_alignment", 16)
    n_rows, hidden = 512, 64
    x, weight = (torch.randn(n, hidden, generator=generator) for n in (n_rows, vocab))
    weight *= hidden**-0.5 / 2
    target = torch.randint(vocab, (n_rows,), generator=generator)
    few, rest = slice(0, n_rows // 8), slice(n_rows // 8, n_rows)
    target[few] = vocab - 1 - target[few] % (vocab % 8)
    target[rest] %= vocab - vocab % 8
    x, weight, target = (t.to(lane.device) for t in (x.bfloat16(), weight.bfloat16(), target))
    slopes = torch.softmax(x.float() @ weight.float().t(), -1)
    slopes[torch.arange(n_rows, device=lane.device), target] -= 1
    slopes = slopes.bfloat16()
    exact = slopes.double() @ weight.double()
    dx = torch.empty_like(x)
    dx_of(slopes, weight, dx, True)
    whole = gemm_columns(vocab, 2, 16)[-1]
    large = torch.zeros_like(x).addmm_(slopes[:, whole], weight[whole])  # as dx_of: the call's shape splits the sum
    alone = (large.double() - slopes[:, whole].double() @ weight[whole].double())[rest].norm()
    assert (dx.double() - exact)[rest].norm() <= 1.01 * alone
    assert (dx.double() - exact)[few].norm() <= 1.5 * (exact[few].bfloat16().double() - exact[few]).norm()


@pytest.mark.parametrize("column", [3, 200])
def test_a_target_alone_is_rounded_once(lane, generator, column):
    """Entries at the targets and next to nothing elsewhere: the gradient is the fp32 sum, rounded once."""
    dtype, (n_rows, hidden, vocab) = torch.float16, (24, 8, 256)
    x, weight = (torch.randn(n, hidden, generator=generator).to(lane.device, dtype) for n in (n_rows, vocab))
    target = torch.full((n_rows,), column, device=lane.device)  # frequent: 24 times
    target[:8] = torch.tensor([9, 0, 255, 9, 7, 0, 1, 9], device=lane.device)
    slopes = torch.randn(n_rows, generator=generator).to(lane.device, dtype)
    chunks = Chunks([(i, i + 4) for i in range(0, n_rows, 4)])
    grads = HeadGradients(x, weight, (False, True, False), chunks, target, lane.name == "cpu")
    whole = torch.zeros(n_rows, vocab, device=lane.device, dtype=dtype).scatter_(1, target[:, None], slopes[:, None])
    for start, logits, _ in sweep(chunks, x, weight, grads):
        logits.copy_(whole[start : start + 4])
    exact = whole.double().t() @ x.double()
    found = grads.results()[1]
    torch.testing.assert_close(found.double(), exact.to(dtype).double(), rtol=2**-10, atol=1e-6)
    assert (found == exact.to(dtype)).float().mean() > 0.999


@pytest.mark.daily("interpret", name="fused_linear_cross_entropy")
@pytest.mark.lanes("interpret", "gpu")
@pytest.mark.parametrize("name", ["fused_linear_cross_entropy", "fused_linear_log_probs"])
def test_losses_accumulate_their_targets_separately(lane, small_chunks, name, seed, monkeypatch):
    """fp16 over more chunks than are summed as they are, with ignored rows and the whole comparison of the
    conformance suite."""
    seen = []
    real = linear_head.TargetEntries
    monkeypatch.setattr(linear_head, "TargetEntries", lambda *a: seen.append(1) or real(*a))
    op = get_op(name)
    verify(op, make(op, (3 * MANY, 9, 19), torch.float16, lane.device, seed, {"ignored": 0.3}), seed)
    assert seen
