"""`fuse{cut=...}`: values that no launch makes and reads."""

from __future__ import annotations

import warnings

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import arrays, graphs

from gpuir import interp
from gpuir.passes.fuse import Fuse
from gpuir.passes.legalize import Legalize
from gpuir.passes.manager import Pipeline


@given(graphs(control=False), st.data())
def test_a_cut_keeps_meaning_and_holds(g, data):
    names = [v.name for n in g.nodes for v in n.results if not set(v.name) & set("*?[ \t\n")]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    fused = Pipeline((Fuse(cut=" ".join(chosen)),)).run(g)
    kernels = Pipeline((Legalize(),)).run(fused)
    values = arrays(g)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        expected, found = interp.run(g, values), interp.run(kernels, values)
    for v in g.outputs:
        np.testing.assert_allclose(found[v.name], expected[v.name], rtol=2e-2, atol=2e-2)
    made = {v.name for n in g.nodes if not n.op.operands for v in n.results}  # constants are copied
    for node in fused.nodes:
        for body in node.op.regions:
            inner = {v.name for n in body.nodes for v in n.results} - made
            read = {v.name for n in body.nodes for v in n.op.operands}
            assert not inner & read & set(chosen)
