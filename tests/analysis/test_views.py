"""`views.view_of` describes the values of nodes correctly, in random chains of views, slices and casts."""

import random

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp4compile.analysis.views import swaps_last_two, value_key, view_of

aten = torch.ops.aten


def _dim(rng, x):
    return rng.randrange(-x.dim(), x.dim())


def _reshape(rng, x):
    """A random factorisation of the number of elements."""
    left, sizes = x.numel(), []
    while left > 1:
        factor = rng.choice([f for f in range(2, left + 1) if left % f == 0])
        sizes.append(factor)
        left //= factor
    rng.shuffle(sizes)
    return x.reshape(sizes or [1])


def _expand(rng, x):
    return x.unsqueeze(0).expand(rng.choice((1, 3)), *x.shape)


def _widen(rng, x):
    """One of the places of a dimension, which has the stride of the dimension, repeated."""
    dim = _dim(rng, x) % x.dim()
    start, size = rng.randrange(x.shape[dim]), list(x.shape)
    size[dim] = rng.choice((1, 3))
    return aten.slice.Tensor(x, dim, start, start + 1).expand(size)


def _permute(rng, x):
    dims = list(range(x.dim()))
    rng.shuffle(dims)
    return x.permute(dims)


def _slice(rng, x):
    dim = _dim(rng, x)
    start = rng.randrange(-x.shape[dim] - 2, x.shape[dim])
    return aten.slice.Tensor(x, dim, start, rng.choice((None, 2**62)), rng.choice((1, 2)))


def _split(rng, x):
    dim = _dim(rng, x)
    pieces = rng.choice((
        lambda: x.unbind(dim), lambda: x.split(2, dim), lambda: x.chunk(3, dim),
        lambda: x.split([1, x.shape[dim] - 1], dim),
    ))()  # fmt: skip
    return rng.choice([piece for piece in pieces if piece.numel()])


_CHAIN = (
    _reshape, _reshape, _expand, _widen, _permute, _slice, _split,
    lambda rng, x: x.unsqueeze(rng.randrange(-x.dim() - 1, x.dim() + 1)),
    lambda rng, x: x.unsqueeze(0).transpose(0, _dim(rng, x)).squeeze(),
    lambda rng, x: x.unsqueeze(1).squeeze(1),
    lambda rng, x: x.unsqueeze(1).squeeze([0, 1]),
    lambda rng, x: aten.t(x) if x.dim() <= 2 else x.transpose(0, -1),
    lambda rng, x: x.select(_dim(rng, x), -1),
    lambda rng, x: x.clone(memory_format=torch.contiguous_format),
    lambda rng, x: x.to(torch.float32),
    lambda rng, x: x.to(torch.bfloat16),
    lambda rng, x: x.to(torch.int8),
)  # fmt: skip


def _chain(seed):
    """A function that applies a few random steps to a tensor, and returns all intermediate values."""

    def run(x):
        rng, found = random.Random(seed), []
        for _ in range(rng.randrange(2, 8)):
            if x.dim() and x.numel():
                x = rng.choice(_CHAIN)(rng, x)
                found.append(x)
        return found

    return run


def _read(view, values):
    """The elements that a view describes, read from its root's value."""
    flat = values[view.root].reshape(-1)
    value = flat.as_strided(view.size, view.stride, view.offset)
    for dtype in view.casts:
        value = value.to(dtype)
    return value


class _Values(torch.fx.Interpreter):
    def __init__(self, module):
        super().__init__(module)
        self.values = {}

    def run_node(self, node):
        self.values[node] = super().run_node(node)
        return self.values[node]


def _traced(seed):
    """The value of every node of a chain's graph. The elements are random, so that no two are equal."""
    x = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(seed)) * 40
    module = make_fx(_chain(seed))(x)
    interpreter = _Values(module)
    interpreter.run(x)
    return {node: value for node, value in interpreter.values.items() if isinstance(value, torch.Tensor)}


def test_a_view_names_the_elements_of_its_node_and_equal_keys_are_equal_values():
    views = equal = 0
    for seed in range(200):
        values, by_key = _traced(seed), {}
        for node, value in values.items():
            view = view_of(node)
            views += view.root is not node
            assert tuple(view.size) == tuple(value.shape), f"seed {seed}, {node}"
            assert torch.equal(_read(view, values).to(value.dtype), value), f"seed {seed}, {node}"
            other = by_key.setdefault(value_key(node), value)
            equal += other is not value
            assert other.dtype == value.dtype and torch.equal(other, value), f"seed {seed}, {node}"
    assert views > 400 and equal > 50  # most nodes are views of another node, and there are pairs of equal keys


def test_a_dimension_of_size_1_that_is_expanded_repeats():
    """Its stride in memory is that of a row; in the view it is 0, or the view would name rows that are not there."""

    def expanded(w):
        rows = w.expand(3, 4)
        return rows, rows.t(), w.expand(1, 4)

    rows, columns, same = map(view_of, make_fx(expanded)(torch.randn(1, 4)).graph.output_node().args[0])
    assert (rows.stride, columns.stride, same.stride) == ((0, 1), (1, 0), (4, 1))
    assert rows.repeats and columns.repeats and not same.repeats


def test_as_strided_addresses_the_memory_of_its_argument():
    """Offsets count from where the memory begins, and the argument may begin later; without one it is where that does.

    Only a tensor that is no view itself tells where: of others the memory is not known.
    """

    def strided(w):
        of_view = aten.as_strided.default(aten.slice.Tensor(w, 0, 1, 4), [2, 3], [3, 1])
        of_columns = aten.as_strided.default(aten.t.default(w), [2, 3], [3, 1])
        here, given = (aten.as_strided.default(w, [2, 3], [1, 3], *offset) for offset in ((), (13,)))
        return here, given, aten.slice.Tensor(given, 0, 1, 2), of_view, of_columns

    with FakeTensorMode():
        nodes = make_fx(strided)(torch.empty(8, 6)[2:]).graph.output_node().args[0]
    here, given, row, *roots = map(view_of, nodes)
    assert (here.offset, given.offset, row.offset) == (0, 1, 2) and here.root is given.root is row.root
    assert (given.size, given.stride) == ((2, 3), (1, 3))
    assert [view.root for view in roots] == list(nodes[3:])


def test_only_casts_on_one_device_are_views():
    with FakeTensorMode():
        x = torch.empty(4, 4, device="cuda")
        moved, cast = (
            make_fx(lambda x: (aten._to_copy.default(x, device=torch.device("cpu")), x.bfloat16()))(x)
            .graph.output_node()
            .args[0]
        )
    assert view_of(moved).root is moved and view_of(cast).root is not cast


@pytest.mark.parametrize(("turn", "swaps"), [
    (lambda x: aten.transpose.int(x, -1, 2), True), (lambda x: aten.transpose.int(x, 1, 2), False),
    (lambda x: aten.permute.default(x, [0, 1, 3, 2]), True), (lambda x: aten.permute.default(x, [0, 1, -1, -2]), True),
    (lambda x: aten.permute.default(x, [1, 0, 3, 2]), False), (lambda x: aten.permute.default(x, [3, 2, 0, 1]), False),
    (lambda x: aten.t.default(x[0, 0]), True), (lambda x: aten.t.default(x[0, 0, 0]), False), (torch.relu, False),
])  # fmt: skip
def test_what_swaps_the_last_two_dimensions(turn, swaps):
    (node,) = make_fx(turn)(torch.randn(2, 3, 4, 5)).graph.output_node().all_input_nodes
    assert swaps_last_two(node) == swaps


def test_pieces_of_a_tensor_are_not_each_other():
    def pieces(x):
        return [*x.chunk(2), *x.split([3, 5]), *x.unbind(1), x[:4], x[4:]]

    graph = make_fx(pieces)(torch.randn(8, 3)).graph
    (outputs,) = graph.output_node().args
    first, second, _, _, *columns, top, bottom = map(value_key, outputs)
    assert len({first, second, *columns}) == 5
    assert (first, second) == (top, bottom)


def test_symbolic_sizes_are_compared_without_guards():
    def twice(x):
        return x.view(-1, 8), x.reshape(x.shape[0] * x.shape[1], 8), x.transpose(0, 1).reshape(-1, 8)

    module = make_fx(twice, tracing_mode="symbolic")(torch.randn(5, 3, 8))
    (outputs,) = module.graph.output_node().args
    shape_env = outputs[0].meta["val"].fake_mode.shape_env
    before = len(shape_env.guards)
    same, also, other = map(value_key, outputs)
    assert same == also != other
    assert len(shape_env.guards) == before


def test_casts_that_lose_bits_are_kept():
    def casts(w):
        half, signs, short = w.to(torch.float16), w.to(torch.bool), w.to(torch.bfloat16)
        wide = [narrow.to(torch.float32) for narrow in (half, signs, short)]
        return w, wide[0], half, *wide[1:], half.to(torch.bfloat16)

    (outputs,) = make_fx(casts)(torch.randn(4, 4)).graph.output_node().args
    same, through_half, half, through_bool, through_bfloat16, through_both = (view_of(node) for node in outputs)
    assert same.casts == () and through_half.elements == half.elements
    assert len({view.elements for view in (same, half, through_bool, through_bfloat16, through_both)}) == 5
