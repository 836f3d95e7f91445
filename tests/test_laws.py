"""The laws of the house, on drawn graphs."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import arrays, graphs

from gpuir import interp
from gpuir.ir.graph import Graph, Level
from gpuir.ir.verify import verify
from gpuir.schedule import apply, extract, strip
from gpuir.stacks.table import pipeline
from gpuir.targets.profile import Profile, load_profile, profile_names
from gpuir.text import parse, show

PROFILES = [load_profile(name) for name in profile_names()]


def levels(g: Graph, profile: Profile) -> list[Graph]:
    """The graph after each step of a profile's passes, of tiling and costing, itself first."""
    steps = [g]
    passes = pipeline(f"{profile.passes},tile{{target=a100}},annotate")
    passes.run(g, watch=lambda _, after: steps.append(after))
    return steps


def results(g: Graph, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        found = interp.run(g, values)
    return [found[v.name] for v in g.outputs]


@given(graphs(), st.sampled_from(PROFILES))
def test_text_round_trips_at_every_level(g, profile):
    for step in levels(g, profile):
        assert show(parse(show(step))) == show(step)
        assert parse(show(step)).roles == step.roles


@given(graphs(), st.sampled_from(PROFILES))
def test_passes_keep_roles_and_what_outputs_take_over(g, profile):
    for step in levels(g, profile):
        assert step.over == g.over
        for v in (*step.inputs, *step.params, *(r for n in step.nodes for r in n.results)):
            if v.name in dict(g.roles):
                assert step.role_of(v) == dict(g.roles)[v.name]


@given(graphs(), st.sampled_from(PROFILES))
def test_passes_keep_meaning_and_output_types(g, profile):
    values = arrays(g)
    expected = results(g, values)
    for step in levels(g, profile):
        assert [v.type for v in step.outputs] == [v.type for v in g.outputs]
        for a, b in zip(results(step, values), expected, strict=True):
            np.testing.assert_allclose(
                a.astype(np.float64), b.astype(np.float64), rtol=2e-2, atol=2e-2
            )


@given(graphs(), st.sampled_from(PROFILES))
def test_fuse_and_legalize_keep_flops(g, profile):
    def flops(g: Graph) -> int:
        return sum(n.op.flops() for n in g.nodes)

    read = pipeline("canonicalize").run(g)  # what nobody reads is gone
    passes = {p.name: p for p in pipeline(profile.passes).passes}
    again = "fuse_loops" in passes  # loops compute again what they share
    fused = passes["fuse_loops" if again else "fuse"].run(read)
    assert flops(fused) >= flops(read) if again else flops(fused) == flops(read)
    assert flops(passes["legalize"].run(fused)) == flops(fused)


@given(graphs(), st.sampled_from(PROFILES))
def test_every_location_is_kept_or_folded(g, profile):
    """What a pass adds besides (`beside`) has its own location: the node's, a dot and a word."""

    def locs(g: Graph) -> set[str]:
        return {loc for n in g.walk() for loc in n.locs} | set(g.folded)

    read = locs(g)
    for step in levels(g, profile):
        assert locs(step) >= read
        assert all(any(new.startswith(f"{loc}.") for loc in read) for new in locs(step) - read)
        assert not set(step.folded) & {loc for n in step.walk() for loc in n.locs}


@given(graphs())
def test_canonicalizing_twice_changes_nothing(g):
    once = pipeline("canonicalize").run(g)
    assert show(pipeline("canonicalize").run(once)) == show(once)


@given(graphs())
def test_no_pass_needs_canonicalize(g):
    pipeline("fuse,legalize,tile{target=a100},annotate").run(g)


@given(graphs())
def test_schedule_comes_off_and_goes_back_on(g):
    tiled = pipeline("fuse,legalize,tile{target=a100}").run(g)
    assert apply(strip(tiled), extract(tiled)) == tiled


@given(graphs(), st.sampled_from(["a100", "t4", "h100-sxm", "mi250x"]))
def test_costs_are_no_less_than_their_terms(g, target):
    costed = pipeline(f"fuse,legalize,tile{{target={target}}},annotate").run(g)
    verify(costed)
    assert costed.level == Level.costed
    assert all(n.cost is not None and n.cost.time_s >= 0 for n in costed.walk())


@pytest.mark.parametrize(
    "text",
    ["canonicalize,fuse{max_ops=8},legalize", 'fuse{rules=none},legalize,tile{target="a b"}'],
)
def test_pipelines_print_as_they_parse(text):
    assert str(pipeline(text)) == text
