"""A software stack as data: which ops share a launch, in which dtypes, and what the host spends."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import exp, hypot, log
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, cast, get_args

from gpuir.ir.door import PATH, of_type, takes
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.graph import Graph, Level
from gpuir.plugins import installed
from gpuir.targets.host import REFERENCE, Spread, load_host
from gpuir.targets.load import load_target
from gpuir.targets.spec import (
    Raw,
    SpecKind,
    check_name,
    check_notes,
    is_path,
    paths_to_text,
    plugin_path,
    read_spec,
    record,
    refuse,
    spec_files,
    unknown,
)
from gpuir.targets.target import (
    BytesPerS,
    FlopPerS,
    FrozenTable,
    Quantity,
    Sourced,
    Target,
)

Factor = Annotated[float, Quantity("", 0.1, 10)]
Part = Annotated[float, Quantity("", 0, 1)]
HostTime = Annotated[float, Quantity("s", 0, 1e-2)]
Queue = Annotated[int, Quantity("", 1, 1 << 20, "launches in flight")]
Share = Annotated[float, Quantity("", 1e-3, 1)]
_NO_TEXT: FrozenTable[str] = FrozenTable()
_NO_TIMES: FrozenTable[HostTime] = FrozenTable()
_NO_FACTORS: FrozenTable[Factor] = FrozenTable()
Tf32 = Literal["none", "conv", "products", "all"]
TF32 = get_args(Tf32)
_TF32 = "+tf32="  # behind the name of a profile: what runs in TF32 in place of its own
_PRODUCTS = "+products="  # behind that: the narrow floats of products within layers
_HOST = "+host="  # behind that: the machine it runs on
NARROW = ("fp8", "mxfp8")  # floats that products of layers run in, where they are not the model's
EARLY_ATTENTION = ("flash-1", "flash-2")  # `cost.habits` has what they reach
# As `gpuir.stacks.allocators` names them: how device memory is held, and what a stack's libraries
# reserve beside (`none` is nothing).
ALLOCATORS = ("caching", "arena", "planned", "vllm", "sglang", "trtllm")
WORKSPACES = ("pytorch", "none")
KINDS = (  # of kernels that are launched, as `gpuir.ops.kernel` names them
    *("gemm", "conv", "attention", "map", "reduce", "pool", "experts"),
    *("attention_gradient", "experts_gradient", "gather", "scatter", "copy", "collective"),
    *("routine", "opaque"),
)


@dataclass(frozen=True)
class Host:
    """What one host thread spends around the launches of a model's ops, in seconds.

    The five parts are those of Lin et al., TPDS 2024, section 4: `between_s` from one op to the
    next (T1), `before_s` from an op's start to its first launch (T2), `launch_s` the launch call
    (T4), `next_s` between two launches of an op (T5), or `library_s` where that differs within a
    loop of the op (a library's LSTM), `after_s` from the last launch to the op's end (T3). `before`
    is T2 of the ops that have a kernel of that kind, where it is not `before_s`; of several kinds
    the dearest counts. An op that launches nothing (a view) takes `empty_s`, a call of the model
    `call_s` before its first op, and so does one of its backward pass and one of its optimizer;
    before the first comes `param_s` for each weight and buffer, what guards and checks of arguments
    take; a trip of a loop of the model takes `trip_s`, and a module that the forward pass enters
    on its way from one op to the next `module_s`, but for one: ops of T1 are in modules of their
    own.

    With `graph` each such call is one launch, of a CUDA graph, to which each kernel adds `graph_s`.
    `queue` launches may wait for the device before the host does. In 80 % of cases the host takes
    between 1/`uncertainty` and `uncertainty` times as long for everything.
    """

    between_s: HostTime
    before_s: HostTime
    launch_s: HostTime
    next_s: HostTime
    after_s: HostTime
    empty_s: HostTime
    call_s: HostTime
    queue: Queue
    param_s: HostTime = 0.0
    trip_s: HostTime = 0.0
    module_s: HostTime = 0.0
    library_s: HostTime | None = None
    graph: bool = False
    graph_s: HostTime = 0.0
    uncertainty: Spread = 1.0
    before: FrozenTable[HostTime] = _NO_TIMES

    def scaled(self, by: float) -> Host:
        """A host that takes `by` times as long for everything."""
        names = (spec.name for spec in fields(self) if spec.name.endswith("_s"))
        given = {name: cast(float | None, getattr(self, name)) for name in names}
        times = {name: by * time for name, time in given.items() if time and name != "graph_s"}
        before = FrozenTable({kind: by * time for kind, time in self.before.items()})
        return replace(self, before=before, **times)


NO_HOST = Host(
    between_s=0,
    before_s=0,
    launch_s=0,
    next_s=0,
    after_s=0,
    empty_s=0,
    call_s=0,
    queue=1 << 20,
)


@dataclass(frozen=True)
class Copies:
    """Inputs that come from the host's memory, and outputs that go back to it: each is a call of
    `call_s` and its bytes at `share` of the PCIe link's rate; the host waits for it."""

    call_s: HostTime
    share: Share


@dataclass(frozen=True)
class Fallback:
    """Nodes that a stack has no kernel for run on the host's CPU, at `flops_per_s` or `bytes_per_s`
    and `call_s` besides; in 80 % of cases that takes between 1/`uncertainty` and `uncertainty`
    times as long.
    """

    flops_per_s: FlopPerS
    bytes_per_s: BytesPerS
    call_s: HostTime
    uncertainty: Spread


@dataclass(frozen=True)
class Habits:
    """In what a release differs from the kernels and the waits that gpuir's times are of.

    `attention` is the release of FlashAttention that it calls (`EARLY_ATTENTION`), in place of the
    device's usual kernel. Kernels without products take as many times as long as `memory` says of
    an architecture. `felt` is the share of collectives' time behind kernels that a step takes
    longer all the same. `reentrant` checkpoints run a block whole again, its last product too,
    whose result nobody reads (torch.utils.checkpoint stops before it).
    """

    attention: str = ""
    memory: FrozenTable[Factor] = _NO_FACTORS
    felt: Part | None = None
    reentrant: bool = False


@dataclass(frozen=True, repr=False)
class Profile(Sourced):
    """How a stack runs a model. `passes` is the pipeline from a graph to its kernels, and says what
    the stack recognises and fuses; `tf32` which f32 kernels run in TF32 on the matrix units by
    default: `none`, `conv`, `products` or `all`. With `views` slices, transposes and reshapes move
    nothing where strides can say them: elementwise, reducing, joining and scattering kernels take
    any strides. `decode` is the host of a step of generation that gives each sequence one token,
    where that is another (`simulate/timeline.py`). `machine` is the host (`targets/host.py`) that
    both are of, empty where no spec describes it. `streams` is how many run independent branches
    beside each other. Without `copies`, inputs lie on the device and outputs stay there.

    `base` is the shipped profile that this one starts from, if any; `vendors` are those whose
    devices the stack is made for, all where none is named: on others it is taken as it is, and
    `titles` has what of the stack would run there, by vendor. `needs`
    are those that it runs on at all, each with its least architecture (`NVIDIA sm_75`), `dtypes`
    the least of a dtype (`bf16 sm_80`), and `emulated` the same where it computes in f32 below.
    `operators` names the list of ONNX operators that it has kernels for, and `fallback` is what
    the others take on the CPU. `allocator` is how it holds device memory (`stacks/allocators.py`).
    `workspace` says what its libraries reserve beside that for products: `pytorch` what cuBLAS does
    through PyTorch, `none` nothing; where nothing is said it is not counted, and reports say so.
    In 80 % of whole runs the kernels together take between 1/`quicker` and `slower` times as long
    for what no kernel's interval has: the release, the engine, how the board is cooled.
    `alternatives` are the profiles that could run the same model, and
    `effort` what it takes a user to run one under this profile. `products` are the narrow floats
    (`NARROW`) that products within layers run in, empty where they are of their operands' dtype,
    and `habits` what the release does in ways of its own."""

    name: str
    title: str
    passes: str
    tf32: str
    host: Host
    machine: str = REFERENCE
    views: bool = False
    decode: Host | None = None
    streams: Annotated[int, Quantity("", 1, 128)] = 1
    copies: Copies | None = None
    base: str = ""
    vendors: tuple[str, ...] = ()
    titles: FrozenTable[str] = _NO_TEXT
    needs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    emulated: tuple[str, ...] = ()
    operators: str = ""
    fallback: Fallback | None = None
    allocator: str = "caching"
    workspace: str = ""
    quicker: Spread | None = None
    slower: Spread | None = None
    alternatives: tuple[str, ...] = ()
    effort: str = ""
    products: str = ""
    habits: Habits | None = None
    notes: str = ""
    sources: FrozenTable[str] = _NO_TEXT

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """That no document says some of its numbers, in words."""
        paths = [path for path, text in self.sources.items() if text.startswith("assumed")]
        if not paths:
            return ()
        numbers = ", ".join(path.removeprefix("host.") for path in paths)
        return (f"profile {self.name}: {numbers}; `gpuir profiles {self.name}` says how",)


@takes(name=PATH, target=of_type(Target, "a target", "gpuir.load_target('a100')"))
def load_profile(name: str | Path, target: Target | None = None) -> Profile:
    """The profile of a built-in name, of one with a release (`tensorrt@8.2`, by the profile that
    describes it), of a `.toml` path, or of a plug-in's name; with `+tf32=none`
    behind it (`conv`, `products`, `all`) another rule than its own, behind that `+products=fp8`
    (`mxfp8`) products within layers in those floats, and behind that `+host=dgx-1` (or a `.toml`
    path) on that machine. Where no machine is named and its numbers are of the
    reference, on the one that `target` is usually in. TargetError when nothing has that name or the
    file is wrong, or where the machine that its numbers are of is not known."""
    plain, rule, products, host = _divided(str(name))
    profile = cast(Profile, _KIND.load(plain or "ideal"))
    if rule and rule not in TF32:
        raise UsageError(f"no tf32 rule {rule!r}", fix=f"one of {', '.join(TF32)}")
    if products and products not in NARROW:
        raise UsageError(f"no products run in {products!r}", fix=f"one of {', '.join(NARROW)}")
    profile = replace(profile, tf32=rule) if rule else profile
    profile = replace(profile, products=products) if products else profile
    if not host and target is not None and profile.machine == REFERENCE:
        host = target.host
    return _on(profile, host) if host else profile


class _Name(NamedTuple):
    """The parts of a profile's name; empty are those not there."""

    plain: str
    tf32: str = ""
    products: str = ""
    host: str = ""

    def __str__(self) -> str:
        behind = ((_TF32, self.tf32), (_PRODUCTS, self.products), (_HOST, self.host))
        return self.plain + "".join(key + value for key, value in behind if value)

    def over(self, other: str) -> _Name:
        """Another profile's name with what this one says beside a profile."""
        said = {key: value for key, value in self._asdict().items() if value and key != "plain"}
        return _divided(other)._replace(**said)


def _divided(name: str) -> _Name:
    """`our.toml+tf32=none+products=fp8+host=dgx-1` by its parts."""
    rest, _, host = name.partition(_HOST)
    rest, _, products = rest.partition(_PRODUCTS)
    plain, _, rule = rest.partition(_TF32)
    return _Name(plain, rule, products, host)


def on_own(given: str | PathLike[str], own: str) -> str:
    """The profile given, or where it says only what stands behind a name, `own` with that."""
    name = _divided(fspath(given))
    return str(name if name.plain else name.over(own))


def on_same_host(name: str, other: str | None) -> str:
    """A profile's name on the host that another's name has, if it has one."""
    return str(_divided(name)._replace(host=_divided(other or "").host))


def _on(profile: Profile, name: str) -> Profile:
    """The profile on a host: all of the host's times as much longer as that machine takes, and as
    uncertain as both are, which are independent."""
    if not profile.machine:
        raise UsageError(
            f"the profile {profile.name} has times of the host, but the "
            "machine they were measured on is not described",
            found=f"host {name}",
            fix='remove the host, or add machine = "reference" (or the name of a '
            "host) to the profile",
        )
    of, there = load_host(profile.machine), load_host(name)
    by = there.slowdown / of.slowdown

    def moved(host: Host) -> Host:
        both = _both(host.uncertainty, there.uncertainty)
        return replace(host.scaled(by), uncertainty=both)

    decode = None if profile.decode is None else moved(profile.decode)
    return replace(profile, host=moved(profile.host), decode=decode, machine=name)


def _both(one: float, other: float) -> float:
    """How far off a product is whose factors are independent, each log-normal."""
    return max(one, other) if 1 in (one, other) else exp(hypot(log(one), log(other)))


def profile_of(g: Graph) -> Profile:
    """The profile that a graph runs under, on its host where it names one, else on the usual one of
    its target; `ideal` for one that was lowered by hand."""
    return load_profile(_own(g) or "ideal", load_target(g.target) if g.target else None)


def default_profile(g: Graph) -> str:
    """The profile of a graph that nobody gives one: PyTorch's own for a program, onnxruntime's for
    all else. This alone asks what a model was written in."""
    return {"pytorch": "eager"}.get(g.framework or "", "ort")


def has_views(g: Graph) -> bool:
    """Whether a graph's layout ops move nothing where strides can say them; not where no stack is
    named."""
    name = _own(g)
    return name is not None and load_profile(name).views


def under(g: Graph, profile: str | PathLike[str] | None = None, tf32: bool | None = None) -> Graph:
    """The graph with the profile that it runs under.

    `profile` is a name or path; without it that is the graph's own, else `eager` for what came from
    PyTorch and `ort` for an ONNX file, and for all else that is not lowered yet. What a profile has
    lowered cannot run under another: UsageError. `tf32` lets all f32 products run on the matrix
    units, or none, and the profile's name then says so: `ort+tf32=none`.
    """
    if not isinstance(cast("object", profile), str | PathLike | None):
        raise UsageError(
            "profile: this is neither a name nor a path",
            expected='profile="compiled"',
            found=f"profile={profile!r}"[:200],
        )
    chosen = _chosen(g, None if profile is None else fspath(profile))
    if tf32 is None or chosen is None or g.level == Level.costed:
        return replace(g, profile=chosen)
    return replace(g, profile=_allowing(chosen, "products" if tf32 else "none"))


def _allowing(name: str, rule: Tf32) -> str:
    """The name of a profile that goes by this rule of TF32; one that has `all` in TF32 has the
    `products` so."""
    own = _divided(name)
    enough = (rule, {"products": "all"}.get(rule))
    fits = (x for x in (name, str(own._replace(tf32=""))) if load_profile(x).tf32 in enough)
    return next(fits, str(own._replace(tf32=rule)))


def _own(g: Graph) -> str | None:
    """The profile of a graph that is given none; None where it was lowered by hand."""
    by_hand = g.framework is None and g.level != Level.graph
    return g.profile or (None if by_hand else default_profile(g))


def _chosen(g: Graph, given: str | None) -> str | None:
    """The name for a graph of what was asked for; what stands behind no name, a host or narrow
    products, is for the graph's own."""
    own = _own(g)
    if given is None:
        return own
    load_profile(given)
    name = _divided(given)
    late = g.level > Level.graph and g.profile is not None
    if not name.plain:
        return own and on_own(given, own)
    if not late:
        return given
    if load_profile(str(g.profile)).name != load_profile(given).name:
        raise UsageError(
            f"@{g.name} has the level {g.level.name} and was made under another profile",
            expected=g.profile or "",
            found=given,
            fix="start from a graph of level graph",
        )
    return str(name._replace(tf32="").over(str(g.profile)))


def tf32_rule(g: Graph) -> str:
    """Which f32 products of a graph its stack runs in TF32, where the device has it."""
    name = _own(g)
    return "none" if name is None else load_profile(name).tf32


def profile_names() -> tuple[str, ...]:
    """Names of the built-in profiles and of those that installed plug-ins add, sorted."""
    return tuple(sorted({*_KIND.shipped, *installed("profiles")}))


def _find(name: str) -> Path:
    if is_path(name):
        return Path(name)
    if (own := _of_release(name)) in _KIND.shipped:
        return _KIND.shipped[own]
    plugins = installed("profiles")
    if name in plugins:
        return plugin_path(plugins[name], "profile")
    raise unknown("profile", name, profile_names())


def _of_release(name: str) -> str:
    """The built-in profile that describes a release, `tensorrt@8.2`: the one of the first release
    from there on that has its own, `tensorrt@8.5`, or the newest, which has no number."""
    stack, at, release = name.partition("@")
    if not at or name in _KIND.shipped or stack not in _KIND.shipped:
        return name
    if not (asked := _numbers(release)):
        return name
    later = (x for x in _KIND.shipped if x.startswith(f"{stack}@"))
    found = {n: x for x in later if (n := _numbers(x.partition("@")[2])) >= asked}
    return found[min(found)] if found else stack


def _numbers(release: str) -> tuple[int, ...]:
    """`8.5` as numbers; empty where it is none."""
    parts = release.split(".")
    return tuple(map(int, parts)) if all(x.isdecimal() for x in parts) else ()


def _tables(path: Path) -> Raw:
    """What a file says. Times of the host in a user's are of a machine of the user's, unless it
    names another."""
    raw = read_spec(path)
    own = ("host" in raw or "decode" in raw) and not _KIND.is_shipped(path)
    return {"machine": "", **raw} if own else raw


def _profile_of(raw: Raw, where: str) -> Profile:
    sources = paths_to_text(raw, "sources", where)
    profile = cast(Profile, record(Profile, {**raw, "sources": FrozenTable(sources)}, "", where))
    _check_words(profile, where)
    check_notes(profile, {"sources": sources}, where)
    return profile


_KIND = SpecKind("profile", "eager", ("profiles",), _profile_of, _find, tables=_tables)


def _check_words(profile: Profile, where: str) -> None:
    check_name(profile.name, "profile", where)
    if profile.machine:
        load_host(profile.machine)
    if profile.tf32 not in TF32:
        refuse(
            "the value of tf32 is not valid",
            where,
            "tf32",
            found=profile.tf32,
            fix=f"one of {', '.join(TF32)}",
        )
    for name, texts, least, what in (
        ("needs", profile.needs, 1, "maker"),
        ("dtypes", profile.dtypes, 2, "dtype"),
        ("emulated", profile.emulated, 2, "dtype"),
    ):
        for text in texts:
            if not least <= len(text.split()) <= 2:
                like = {"maker": "NVIDIA sm_75", "dtype": "bf16 sm_80"}[what]
                wrong = f"{name}: this is not a {what} with its lowest architecture"
                refuse(wrong, where, name, found=text, fix=f"write it as {like}")
    known = spec_files("operators")
    if profile.operators and profile.operators not in known:
        wrong = f"operators: no list of operators is called {profile.operators}"
        refuse(wrong, where, "operators", fix=nearest(profile.operators, known))
    for other in profile.alternatives:
        if other not in _KIND.shipped and other not in installed("profiles"):
            wrong = f"alternatives: no profile is called {other}"
            refuse(wrong, where, "alternatives", fix=nearest(other, _KIND.shipped))
    if profile.allocator not in ALLOCATORS and profile.allocator not in installed("allocators"):
        refuse(
            f"no allocator is called {profile.allocator}",
            where,
            "allocator",
            expected=", ".join((*ALLOCATORS, *sorted(installed("allocators")))),
            fix=nearest(profile.allocator, ALLOCATORS),
        )
    for name, value, among in (
        ("products", profile.products, NARROW),
        ("habits.attention", profile.habits and profile.habits.attention, EARLY_ATTENTION),
    ):
        if value and value not in among:
            refuse(
                f"the value of {name} is unknown",
                where,
                name,
                found=value,
                fix=f"one of {', '.join(among)}, or remove it",
            )
    if profile.workspace not in ("", *WORKSPACES):
        refuse(
            "the value of workspace is unknown",
            where,
            "workspace",
            found=profile.workspace,
            fix=f"one of {', '.join(WORKSPACES)}, or remove it",
        )
    for kind in profile.host.before:
        if kind not in KINDS:
            refuse(
                f"no kind of kernel is called {kind}",
                where,
                f"host.before.{kind}",
                fix=nearest(kind, KINDS),
            )
