"""How MIG divides a GPU: a picture of it, its geometries, one layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any
from xml.sax.saxutils import escape

from gpuir.backends.terminal import cell_width, cut, printable, short_words
from gpuir.report.table import Column, Drawing, Heading, Notes, Part, Report, Table
from gpuir.report.units import quantity
from gpuir.targets.mig import Geometry, InstancePlacement, InstanceProfile, Layout, Mig, is_packed
from gpuir.targets.target import Target

LABEL_LINES = 4  # of what runs in an instance, in a picture
WIDEST_PLACE = 14  # columns of a place in a picture
NARROWEST = 9  # columns of the smallest instance, for its name
MARGIN = 3  # columns for the places' numbers, where boxes stand below each other
IDLE = "idle"


@dataclass(frozen=True)
class Divided:
    """A GPU as it is to be divided: MIG is off where `layout` is None.

    `gpu` is its number on the node (`nvidia-smi -L` has it), None for every GPU there. `parts` has
    the compute instances of each instance of the layout, by their slices: `(1, 2)`; none, or no
    tuple at all, is one that has the whole instance.
    """

    target: Target
    layout: Layout | None = None
    gpu: int | None = None
    parts: tuple[tuple[int, ...], ...] = ()

    def names(self) -> list[list[str]]:
        """The compute instances of each instance, as the driver calls them: `1c.3g.20gb`, or the
        profile's name for one that has all of it."""
        return [
            [part_name(x.profile, n) for n in self._parts(i) or (x.profile.compute_slices,)]
            for i, x in enumerate(self.layout or ())
        ]

    def is_parted(self, i: int) -> bool:
        """Whether an instance has compute instances other than one that is all of it."""
        whole = (self.layout or ())[i].profile.compute_slices
        return self._parts(i) not in ((), (whole,))

    def _parts(self, i: int) -> tuple[int, ...]:
        return self.parts[i] if i < len(self.parts) else ()


def part_name(profile: InstanceProfile, slices: int) -> str:
    """What the driver calls a compute instance of so many slices."""
    return profile.name if slices == profile.compute_slices else f"{slices}c.{profile.name}"


def counted(profiles: Sequence[InstanceProfile]) -> str:
    """`3g.20gb+2x2g.10gb`: names in the order given, equal ones counted."""
    counts = Counter(p.name for p in profiles)
    return "+".join(f"{n}x{name}" if n > 1 else name for name, n in counts.items())


# ---- pictures -----------------------------------------------------------------------------------


def picture(mig: Mig, layout: Layout, labels: Sequence[str] = (), width: int = 80) -> list[str]:
    """The GPU from its first place to its last, a box an instance: name, SMs, memory, and the label
    of what runs in it; idle places are dotted. Where `width` columns are too few for boxes beside
    each other, they stand below each other."""
    unit = min((width - 1) // mig.grid, WIDEST_PLACE)
    if unit * min(p.size for p in mig.profiles) < NARROWEST:
        return _upright(mig, layout, labels, width)
    boxes = list(_boxes(mig, layout, labels))
    shown = [_wrapped(lines, size * unit - 2, label) for _, size, lines, label in boxes]
    edge = "+".join(("-" if lines else ".") * (size * unit - 1) for _, size, lines, _ in boxes)
    ruler = "".join(f"{place:<{unit}}" for place in range(mig.grid))
    rows = [
        "".join(
            f"| {_padded(text[i] if i < len(text) else '', size * unit - 2)}"
            for (_, size, _, _), text in zip(boxes, shown, strict=True)
        )
        + "|"
        for i in range(max(map(len, shown)))
    ]
    return [ruler.rstrip(), f"+{edge}+", *rows, f"+{edge}+"]


def _upright(mig: Mig, layout: Layout, labels: Sequence[str], width: int) -> list[str]:
    """Boxes below each other, as many lines high as they have places, or more if the text is."""
    room = width - MARGIN - 3
    page, edge = list[str](), ""
    for start, size, lines, label in _boxes(mig, layout, labels):
        text = _wrapped(
            [", ".join((lines[0] + lines[1], *lines[2:]))] if lines else (), room, label
        )
        edge = f"{'':{MARGIN}}+{('-' if lines else '.') * (room + 1)}+"
        page.append(edge)
        for i in range(max(size, len(text))):
            place = str(start + i) if i < size else ""
            page.append(f"{place:{MARGIN}}| {_padded(text[i] if i < len(text) else '', room)}|")
    return [*page, edge]


def _boxes(
    mig: Mig, layout: Layout, labels: Sequence[str]
) -> Iterator[tuple[int, int, tuple[str, ...], str]]:
    """First place, places, lines (name, variant, SMs, memory) and label of each box; a stretch that
    is idle has no lines."""
    at = 0
    for i, x in enumerate(layout):
        if x.start > at:
            yield at, x.start - at, (), IDLE
        p = x.profile
        lines = (p.plain, p.variant, f"{p.sms} SMs", quantity(p.bytes, "bytes"))
        yield x.start, p.size, lines, labels[i] if i < len(labels) else ""
        at = x.end
    if at < mig.grid:
        yield at, mig.grid - at, (), IDLE


def _wrapped(lines: Sequence[str], room: int, label: str) -> list[str]:
    """Lines in `room` columns, then the label in a few more."""
    labelled = _broken(short_words(printable(label)), room)
    if len(labelled) > LABEL_LINES:
        last = cut(" ".join(labelled[LABEL_LINES - 1 :]), room)
        labelled = [*labelled[: LABEL_LINES - 1], last]
    return [*(part for line in lines for part in _broken(line, room)), *labelled]


def _broken(text: str, room: int) -> list[str]:
    """A text in lines of no more than `room` columns, broken between words or else letters."""
    lines: list[str] = []
    for word in text.split():
        if lines and cell_width(f"{lines[-1]} {word}") <= room:
            lines[-1] += f" {word}"
            continue
        lines.append("")
        for letter in word:
            if cell_width(lines[-1] + letter) > room:
                lines.append("")
            lines[-1] += letter
    return lines


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cell_width(text))


def strip(mig: Mig, layout: Layout) -> str:
    """The picture in one line, with each instance's compute slices: `|3      |2  |1|.|`."""
    unit = 2 if min(p.size for p in mig.profiles) == 1 else 1
    slices = {x.start: str(x.profile.compute_slices) for x in layout}
    cells = [
        f"{slices[start]:{size * unit - 1}}" if lines else "." * (size * unit - 1)
        for start, size, lines, _ in _boxes(mig, layout, ())
    ]
    return f"|{'|'.join(cells)}|"


WIDTH_PX, LETTER_PX, ROW_PX, TOP_PX = 768, 8, 18, 44


def svg(mig: Mig, layout: Layout, labels: Sequence[str] = (), title: str = "") -> str:
    """The picture as SVG: the same bytes for the same layout."""
    place = WIDTH_PX // mig.grid
    boxes = list(_boxes(mig, layout, labels))
    texts = [
        _wrapped(lines, size * place // LETTER_PX - 1, label) for _, size, lines, label in boxes
    ]
    height = max(map(len, texts)) * ROW_PX + 14
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH_PX + 20}" '
        f'height="{TOP_PX + height + 12}" font-family="sans-serif" font-size="13">',
        f"<title>{escape(printable(title))}</title>",
        f'<text x="10" y="18" font-size="14">{escape(printable(title))}</text>',
    ]
    parts += [
        f'<text x="{12 + i * place}" y="{TOP_PX - 6}" fill="#666">{i}</text>'
        for i in range(mig.grid)
    ]
    for (start, size, lines, _), text in zip(boxes, texts, strict=True):
        left, fill = 10 + start * place, "#dbe9f6" if lines else "none"
        dashed = "" if lines else ' stroke-dasharray="4 3"'
        parts.append(
            f'<rect x="{left}" y="{TOP_PX}" width="{size * place - 2}" height="{height}" '
            f'fill="{fill}" stroke="#4a6f94"{dashed}/>'
        )
        for row, line in enumerate(text):
            y = TOP_PX + 17 + row * ROW_PX
            weight = ' font-weight="bold"' if lines and not row else ""
            parts.append(f'<text x="{left + 6}" y="{y}"{weight}>{escape(line)}</text>')
    return "\n".join([*parts, "</svg>", ""])


# ---- lists --------------------------------------------------------------------------------------


def geometries_report(
    target: Target,
    mig: Mig,
    found: Sequence[Geometry],
    kinds: Sequence[InstanceProfile],
    *,
    packed: bool,
) -> Report:
    """A row a geometry, what the columns mean, and which profiles are not in it."""
    table = _geometries(target, mig, found, ())

    def parts() -> Iterator[Part]:
        which = "packed " if packed else ""
        total = sum(g.layouts for g in found)
        yield Heading(f"{_title(target)}: {len(found)} geometries, {total:,} {which}layouts")
        yield table
        yield Notes(list(_meanings(target, mig, kinds, packed)), 9)

    return _report(target, mig, parts, table)


def _geometries(
    target: Target, mig: Mig, found: Sequence[Geometry], parts: tuple[tuple[int, ...], ...]
) -> Table:
    return Table(
        found,
        (
            Column("instances", "", "name", lambda g: counted(g.profiles)),
            Column("one layout", text=lambda g: strip(mig, g.layout)),
            Column("layouts", "count", "layouts", text=lambda g: str(g.layouts), drop=2),
            Column("SMs", "count", "sms", text=lambda g: str(g.sms)),
            Column("idle", "count", "idle_sms", lambda g: target.sms - g.sms, drop=1),
            _slices("compute", mig.compute_slices, 3),
            _slices("memory", mig.memory_slices),
            Column(field="packed", value=lambda g: is_packed(mig, g.layout)),
            Column(
                field="instances",
                value=lambda g: _instances(Divided(target, g.layout, parts=parts), mig).records(),
            ),
            *(
                Column(
                    field=f"idle_{kind}",
                    value=lambda g, kind=kind: getattr(mig, kind) - getattr(g, kind),
                )
                for kind in ("compute_slices", "memory_slices")
            ),
        ),
        {"gpu": target.name},
    )


def _slices(kind: str, whole: int, drop: int = 0) -> Column:
    """How many slices of the GPU: `3/7`."""
    field = f"{kind}_slices"
    return Column(kind, "count", field, text=lambda x: f"{getattr(x, field)}/{whole}", drop=drop)


def _meanings(
    target: Target, mig: Mig, kinds: Sequence[InstanceProfile], packed: bool
) -> Iterator[tuple[str, str]]:
    yield "layout", "along the memory: the compute slices of each instance; dots are idle"
    never = target.sms - mig.whole.sms
    text = f"that the instances have, of the GPU's {target.sms}"
    yield "SMs", text + (f"; no instance can have {never} of them" if never else "")
    yield "compute", "slices that the instances have; memory likewise"
    if packed:
        yield "packed", "beside such a layout no further instance fits; --all has the others"
    if without := [p.name for p in mig.profiles if p not in kinds]:
        yield "without", f"{', '.join(without)}: --profiles takes any"


def layout_report(mig: Mig, divided: Divided, geometry: Geometry, width: int) -> Report:
    """One layout: its picture, where each instance lies, and what is left."""
    target, names, layout = divided.target, divided.names(), divided.layout or ()

    def parts() -> Iterator[Part]:
        yield Heading(f"{_title(target)}: {counted([x.profile for x in layout])}")
        yield Drawing(picture(mig, layout, part_labels(divided), width))
        yield _instances(divided, mig)
        inside = "of {}: {}; they share its memory"
        full = is_packed(mig, layout)
        yield Notes(
            [
                *(
                    ("parts", inside.format(x, ", ".join(names[i])))
                    for i, x in enumerate(layout)
                    if divided.is_parted(i)
                ),
                ("idle", _idle(target, mig, layout)),
                ("packed", f"{'yes: no' if full else 'no: a'} further instance fits"),
            ]
        )

    made = _geometries(target, mig, [geometry], divided.parts).records
    return _report(target, mig, parts, replace(_instances(divided, mig), nested=made))


def _instances(divided: Divided, mig: Mig) -> Table:
    """The instances of a layout, a row each, with its compute instances."""

    def places(x: InstancePlacement) -> str:
        return str(x.start) if x.profile.size == 1 else f"{x.start}-{x.end - 1}"

    def slices(x: tuple[InstancePlacement, list[str]]) -> str:
        return f"{x[0].profile.compute_slices}/{mig.compute_slices}"

    def of(name: str) -> Callable[[Any], Any]:
        return lambda x: attrgetter(name)(x[0])

    name = divided.target.name
    return Table(
        list(zip(divided.layout or (), divided.names(), strict=True)),
        (
            Column("target", "", "target", lambda x: f"{name}:{x[0].profile.name}"),
            Column("places", text=lambda x: places(x[0])),
            Column(field="name", value=of("profile.name")),
            Column("id", "count", "id", of("profile.id")),
            Column("SMs", "count", "sms", of("profile.sms")),
            Column("memory", "bytes", "bytes", of("profile.bytes")),
            Column("compute", "count", "compute_slices", of("profile.compute_slices"), slices),
            Column("copy", "count", "", of("profile.copy_engines"), drop=2),
            Column("decode", "count", "", of("profile.decoders"), drop=1),
            Column(field="memory_slices", value=of("profile.memory_slices")),
            Column(field="start", value=of("start")),
            Column(field="size", value=of("profile.size")),
            Column(field="compute_instances", value=lambda x: x[1]),
        ),
        {"gpu": name},
    )


def _report(
    target: Target, mig: Mig, parts: Callable[[], Iterator[Part]], geometries: Table
) -> Report:
    return Report(
        "gpuir.mig.layouts/1",
        parts,
        lambda: {
            "gpu": target.name,
            "sms": target.sms,
            "mig_sms": mig.whole.sms,
            "compute_slices": mig.compute_slices,
            "memory_slices": mig.memory_slices,
            "places": mig.grid,
            "geometries": geometries,
        },
    )


def part_labels(divided: Divided) -> list[str]:
    """Of each instance that has several, its compute instances: `1c 2c`."""
    return [
        " ".join(f"{n}c" for n in divided.parts[i]) if divided.is_parted(i) else ""
        for i, _ in enumerate(divided.layout or ())
    ]


def _idle(target: Target, mig: Mig, layout: Layout) -> str:
    sms = target.sms - sum(x.profile.sms for x in layout)
    compute = mig.compute_slices - sum(x.profile.compute_slices for x in layout)
    memory = mig.memory_slices - sum(x.profile.memory_slices for x in layout)
    never = target.sms - mig.whole.sms
    text = f"{sms} of {target.sms} SMs"
    if never:
        text += f" ({never} of them no instance can have)"
    return (
        f"{text}; {compute} of {mig.compute_slices} compute slices, "
        f"{memory} of {mig.memory_slices} memory slices"
    )


def _title(target: Target) -> str:
    return f"{target.title} ({target.name})" if target.title else target.name
