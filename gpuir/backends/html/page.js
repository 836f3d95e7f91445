// Draws the report's charts and kernel table from the data in the page.

const find = (id) => document.getElementById(id);
const all = (query, of = document) => [...of.querySelectorAll(query)];
const data = JSON.parse(find("data").textContent);
const word = (i) => data.words[i];
const coarse = matchMedia("(pointer: coarse)").matches;

let run = data.runs[0];
let printing = false;

// ---- numbers and texts, as a reader has them ---------------------------------------------------

const PREFIXES = ["p", "n", "u", "m", "", "k", "M", "G", "T", "P", "E"];

function significant(value, digits = 3) {
  if (value === 0) return "0";
  const rounded = Number(value.toExponential(digits - 1));
  return rounded.toFixed(Math.max(digits - 1 - Math.floor(Math.log10(Math.abs(rounded)) + 1e-12), 0));
}

function quantity(value, unit, digits = 3) {
  const short = { bytes: "B", "bytes/s": "B/s" }[unit] ?? unit;
  if (!value) return `0 ${short}`;
  const least = unit === "s" ? -4 : 0;
  const most = unit === "s" ? 0 : 6;
  let power = Math.min(Math.max(Math.floor(Math.log10(Math.abs(value)) / 3), least), most);
  if (Number(significant(value / 1000 ** power, digits)) >= 1000 && power < most) power += 1;
  return `${significant(value / 1000 ** power, digits)} ${PREFIXES[power + 4]}${short}`;
}

function plain(value) {
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function measured(value, unit) {
  if (value === null) return "no limit";
  const prefixed = ["s", "Hz", "bytes", "bytes/s", "flop", "flop/s", "W", "J"].includes(unit);
  return prefixed ? quantity(value, unit, 4) : `${plain(value)} ${unit}`.trim();
}

function percent(part, whole = 1) {
  if (!whole) return "-";
  const share = (100 * part) / whole;
  if (share === 0 || share >= 9.95) return `${share.toFixed(0)} %`;
  return share >= 0.05 ? `${share.toFixed(1)} %` : "<0.1 %";
}

function spread(group) {
  if (!group.interval) return "";
  const [low, high] = group.interval.map((end) => Math.round(100 * (end / group.time - 1)));
  return `${low < 0 ? "" : "+"}${low} ${high < 0 ? "" : "+"}${high} %`;
}

const escaped = (text) =>
  String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

const tail = (text, most) => (text.length > most ? `…${text.slice(1 - most)}` : text);

function element(name, options = {}, ...children) {
  const made = Object.assign(document.createElement(name), options);
  made.append(...children);
  return made;
}

// ---- colours -----------------------------------------------------------------------------------

// White text on each has a contrast of at least 4.6, and each on either page of 3.7 (WCAG 2.2, 1.4.3
// and 1.4.11 ask for 4.5 and 3).
const COLOURS = {
  gemm: "#3e72cd", conv: "#1a7f8b", attention: "#ad6116", experts: "#76791a", map: "#27854b",
  reduce: "#8c5ad0", pool: "#8d7023", gather: "#a76157", scatter: "#c3438f", copy: "#d23e38",
  attention_gradient: "#916f24", experts_gradient: "#647d39", collective: "#76791a",
  routine: "#8c6bb1", opaque: "#837062", host: "#70747d",
};
const MORE = ["#3e72cd", "#ad6116", "#27854b", "#8c5ad0", "#1a7f8b", "#c3438f", "#926d43", "#d23e38"];
const colour = (kind) => COLOURS[kind] ?? COLOURS.opaque;

/** The value that a colour of the style sheet has now: light or dark. */
function styled(name) {
  const probe = document.body.appendChild(element("span"));
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// ---- charts ------------------------------------------------------------------------------------

const CONFIG = { displayModeBar: false, responsive: true };

function axis(more) {
  const line = styled("line");
  return { gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true, ...more };
}

function layout(more) {
  const ink = styled("ink");
  return {
    height: 420,
    ...(printing ? { width: 950 } : {}),
    margin: { l: 8, r: 8, t: 8, b: 8 },
    font: { family: "system-ui, sans-serif", size: 13, color: ink },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { align: "left", namelength: -1 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemsizing: "constant" },
    dragmode: coarse ? false : "zoom",
    ...more,
  };
}

function plot(id, traces, more, listen = {}) {
  const place = find(`chart-${id}`);
  const fresh = !place.data;
  Plotly.react(place, traces, layout(more), CONFIG);
  if (fresh) for (const [name, act] of Object.entries(listen)) place.on(`plotly_${name}`, act);
}

function drawComparison() {
  const fastest = Math.min(...data.runs.map((r) => r.latency));
  const runs = data.runs.filter((r) => r.latency <= 10 * fastest);
  const names = runs.map((r) => escaped(r.name));
  const kinds = [...new Set(runs.flatMap((r) => r.kinds.map(([kind]) => kind)))];
  const bars = kinds.map((kind) => ({
    name: escaped(kind),
    x: runs.map((r) => Object.fromEntries(r.kinds)[kind] ?? 0),
    marker: { color: colour(kind) },
  }));
  const known = runs.map((r) => r.gaps + r.kinds.reduce((sum, [, t]) => sum + t, 0));
  const rest = runs.map((r, i) => Math.max(r.latency - known[i], 0));
  bars.push({ name: "waiting", x: runs.map((r) => r.gaps), marker: { color: styled("field") } });
  bars.push({ name: "transfers", x: rest, marker: { color: styled("line") } });
  const traces = bars.map((bar) => ({
    type: "bar", orientation: "h", y: names, ...bar,
    customdata: bar.x.map((t) => quantity(t, "s")), hovertemplate: "%{customdata}",
  }));
  const below = find("chart-comparison").clientWidth < 600 ? 50 + 20 * bars.length : 70; // a legend in one column
  plot("comparison", traces, {
    barmode: "stack",
    height: 20 + 40 * names.length + below,
    margin: { l: 8, r: 8, t: 8, b: below },
    legend: { orientation: "h", xref: "container", yref: "container", x: 0, y: 0, yanchor: "bottom", traceorder: "normal" },
    xaxis: axis({ tickformat: "~s", ticksuffix: "s" }),
    yaxis: axis({ autorange: "reversed", type: "category" }),
  });
}

function drawTime() {
  const parts = run.trees[chosen("tree")] ?? run.trees.kind;
  const own = parts.map(([, , time]) => time); // less what the parts inside take
  parts.forEach(([parent, , time]) => { if (parent >= 0) own[parent] -= time; });
  const children = (i) => parts.flatMap(([parent], j) => (parent === i ? [j] : []));
  const kinds = chosen("tree") === "kind";
  let fork = 0; // the part whose parts have colours of their own: below those that have nearly all
  for (let next = 0; next !== undefined && !kinds; ) {
    fork = next;
    next = children(fork).find((i) => parts[i][2] > 0.8 * parts[fork][2] && children(i).length);
  }
  const branches = children(fork);
  const branch = (i) => (i < 0 ? -1 : parts[i][0] === fork ? branches.indexOf(i) : branch(parts[i][0]));
  const shade = (i) => {
    const of = branch(i);
    if (of < 0) return styled("panel");
    return kinds ? colour(parts[branches[of]][1]) : MORE[of % MORE.length];
  };
  const trace = {
    type: "icicle",
    ids: parts.map((_, i) => String(i)),
    parents: parts.map(([parent]) => (parent < 0 ? "" : String(parent))),
    labels: parts.map(([, label]) => escaped(tail(label, 48))),
    values: own.map((t) => Math.max(t, 0)),
    customdata: parts.map(([, label, time, note]) => [
      escaped(label), quantity(time, "s"), percent(time, parts[0][2]), escaped(note),
    ]),
    branchvalues: "remainder",
    textfont: { color: parts.map((_, i) => (branch(i) < 0 ? styled("ink") : "#ffffff")) },
    texttemplate: "%{label}<br>%{customdata[1]}, %{customdata[2]}",
    hovertemplate: "%{customdata[0]}<br>%{customdata[1]}, %{customdata[2]}<br>%{customdata[3]}<extra></extra>",
    marker: { colors: parts.map((_, i) => shade(i)), line: { color: styled("page"), width: 1 } },
    leaf: { opacity: 1 },
    tiling: { orientation: "v" },
    pathbar: { visible: false },
    maxdepth: 5,
    sort: true,
  };
  const depth = parts.map(() => 1);
  parts.forEach(([parent], i) => { if (parent >= 0) depth[i] = depth[parent] + 1; });
  plot("time", [trace], { height: 16 + 76 * Math.min(Math.max(...depth), trace.maxdepth) });
}

const decades = (values) => {
  const logs = values.filter((v) => v > 0).map(Math.log10);
  return logs.length ? [Math.floor(Math.min(...logs) - 0.15), Math.ceil(Math.max(...logs) + 0.15)] : [0, 1];
};

function drawRoofline() {
  const shown = run.groups.map((g, i) => ({ ...g, i })).filter((g) => g.roof);
  const flat = run.roofs.flops;
  const [left, right] = decades(shown.map((g) => g.roof[0]));
  const [low, high] = decades([...shown.map((g) => g.roof[1]), ...flat.map(([, rate]) => rate)]);
  const slowest = Math.min(...run.roofs.bytes.map(([, rate]) => rate));
  const top = Math.max(...flat.map(([, rate]) => rate));
  const ink = styled("quiet");
  const roofs = [
    ...flat.map(([, rate]) => [[Math.max(rate / slowest, 10 ** left), 10 ** right], [rate, rate], "solid"]),
    ...run.roofs.bytes.map(([, rate]) => {
      const end = Math.min(top / rate, 10 ** right);
      return [[10 ** left, end], [10 ** left * rate, end * rate], rate === slowest ? "solid" : "dash"];
    }),
  ].map(([x, y, dash]) => ({
    x, y, type: "scatter", mode: "lines", line: { color: ink, width: 1.5, dash }, hoverinfo: "skip", showlegend: false,
  }));
  const most = Math.max(...shown.map((g) => g.runs * g.time));
  const kinds = [...new Set(shown.map((g) => g.kind))];
  const points = kinds.map((kind) => {
    const of = shown.filter((g) => g.kind === kind);
    return {
      type: "scatter", mode: "markers", name: escaped(kind),
      x: of.map((g) => g.roof[0]), y: of.map((g) => g.roof[1]),
      marker: {
        color: colour(kind), opacity: 0.7, sizemode: "area", sizemin: 4,
        size: of.map((g) => g.runs * g.time), sizeref: (2 * most) / 44 ** 2,
        line: { color: styled("ink"), width: 0.5 },
      },
      customdata: of.map((g) => [
        g.i, escaped(tail(g.name, 60)), escaped(g.shape), quantity(g.runs * g.time, "s"),
        percent(g.runs * g.time, run.device), quantity(g.roof[1], "flop/s"), significant(g.roof[0]),
        `${g.bound}-bound`,
      ]),
      hovertemplate:
        "%{customdata[1]}<br>%{customdata[2]}<br>%{customdata[3]}, %{customdata[4]} of the kernels' time<br>" +
        "%{customdata[5]} at %{customdata[6]} flop/byte, %{customdata[7]}<extra>%{fullData.name}</extra>",
    };
  });
  plot("roofline", [...roofs, ...points], {
    height: 500,
    xaxis: axis({ type: "log", range: [left, right], title: { text: "flop for each byte read or written" }, dtick: 1, tickformat: "~g" }),
    yaxis: axis({ type: "log", range: [low, high], dtick: 1, tickformat: "~s", ticksuffix: "flop/s" }),
    annotations: roofNames([left, right], [low, high]),
  }, { click: clicked((p) => p.customdata?.[0]), relayout: renameRoofs });
}

/** Each roof's name along it; ranges are powers of ten that are in view. */
function roofNames([left, right], [low, high]) {
  const place = find("chart-roofline");
  const size = place._fullLayout?._size;
  const decade = (size?.h ?? 400) / (high - low); // in pixels
  const angle = Math.atan(decade / ((size?.w ?? place.clientWidth - 90) / (right - left)));
  const named = { showarrow: false, font: { size: 12, color: styled("quiet") } };
  let above = { y: Infinity, taken: 0 };
  const flat = run.roofs.flops
    .filter(([, rate]) => Math.log10(rate) < high)
    .map(([name, rate]) => {
      const y = Math.log10(rate);
      const text = `${name}, ${quantity(rate, "flop/s")}`;
      const xshift = (above.y - y) * decade < 18 ? -above.taken : 0; // beside the name that is as high
      above = { y, taken: 8 * text.length - xshift };
      return { ...named, x: right, y, xanchor: "right", yanchor: "bottom", text: escaped(text), yshift: 1, xshift };
    });
  const apart = Math.min(0.3, 0.6 / (run.roofs.bytes.length - 1)); // of a line's length
  const slanted = run.roofs.bytes.map(([name, rate], i) => {
    const start = Math.max(left, low - Math.log10(rate));
    const end = Math.min(right, high - Math.log10(rate));
    const x = start + (0.16 + apart * i) * (end - start);
    return {
      ...named, x, y: x + Math.log10(rate), textangle: (-angle * 180) / Math.PI,
      xshift: -9 * Math.sin(angle), yshift: 9 * Math.cos(angle), // above its line
      text: escaped(`${name}, ${quantity(rate, "bytes/s")}`), visible: end > start,
    };
  });
  return [...flat, ...slanted];
}

function renameRoofs(change) {
  if (!Object.keys(change).some((key) => key.includes("axis") || key === "autosize")) return;
  const { xaxis, yaxis } = find("chart-roofline")._fullLayout;
  Plotly.relayout("chart-roofline", { annotations: roofNames(xaxis.range, yaxis.range) });
}

// ---- timeline: what is narrower than a pixel is drawn together ---------------------------------

const NS = 1e-9;

function firstEndingAfter(starts, lengths, time) {
  let low = 0;
  let high = starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[middle] + lengths[middle] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Bars of one lane between two times: a span, or neighbours that share a pixel. `shade` is how
    much of its length is busy. */
function bars([lane, starts, lengths, whats], from, to, pixel) {
  const made = [];
  for (let i = firstEndingAfter(starts, lengths, from); i < starts.length && starts[i] <= to; i++) {
    const end = starts[i] + lengths[i];
    const last = made.at(-1);
    if (last && lengths[i] < pixel && last.longest < pixel && starts[i] - last.end < pixel && end - last.start < 4 * pixel) {
      last.end = end;
      last.count += 1;
      last.busy += lengths[i];
      if (lengths[i] > last.longest) Object.assign(last, { longest: lengths[i], what: whats[i] });
    } else {
      made.push({ lane, start: starts[i], end, count: 1, busy: lengths[i], longest: lengths[i], what: whats[i] });
    }
  }
  for (const bar of made) bar.shade = bar.count > 1 ? Math.max(bar.busy / (bar.end - bar.start), 0.1) : 1;
  return made;
}

const isDevice = (lane) => lane.startsWith("stream");

function about(bar) {
  const kernel = bar.what >= 0 ? run.kernels[bar.what] : null;
  const kind = kernel ? run.groups[kernel[0]].kind : word(-1 - bar.what);
  const name = kernel ? word(kernel[1]) : "";
  const what = isDevice(bar.lane) ? kind : kernel ? "launch" : kind;
  const length = `${quantity(bar.busy * NS, "s")} from ${quantity(bar.start * NS, "s", 4)}`;
  if (bar.count > 1) return [what, `${bar.count} together, ${length}`, `the longest: ${tail(name, 50)}`];
  return [what, length, tail(name, 60)];
}

function drawTimeline(range) {
  const place = find("chart-timeline");
  const last = Math.max(0, ...run.lanes.map(([, s, l]) => s.at(-1) + l.at(-1)));
  const [from, to] = range ?? [0, last * NS];
  const pixel = (to - from) / NS / Math.max(place.clientWidth - 90, 200);
  const series = new Map();
  for (const lane of run.lanes) {
    for (const bar of bars(lane, from / NS, to / NS, pixel)) {
      const [what, length, name] = about(bar);
      const key = isDevice(bar.lane) ? what : "host";
      if (!series.has(key)) series.set(key, { name: key === "host" ? "host, copies" : key, key, y: [], base: [], x: [], shades: [], customdata: [] });
      const s = series.get(key);
      s.y.push(escaped(bar.lane));
      s.base.push(bar.start * NS);
      s.x.push((bar.end - bar.start) * NS);
      s.shades.push(bar.shade);
      s.customdata.push([bar.what >= 0 ? run.kernels[bar.what][0] : null, what, length, escaped(name)]);
    }
  }
  const traces = [...series.values()].map(({ key, shades, ...s }) => ({
    type: "bar", orientation: "h", width: 0.7, ...s, name: escaped(s.name),
    marker: { color: colour(key), opacity: shades, line: { width: 0 } },
    hovertemplate: "%{customdata[1]}<br>%{customdata[2]}<br>%{customdata[3]}<extra></extra>",
  }));
  const lanes = run.lanes.map(([lane]) => escaped(lane));
  plot("timeline", traces, {
    barmode: "overlay",
    height: 130 + 56 * lanes.length,
    xaxis: axis({ range: [from, to], tickformat: "~s", ticksuffix: "s", minallowed: 0, maxallowed: last * NS }),
    yaxis: axis({ categoryorder: "array", categoryarray: lanes, autorange: "reversed", fixedrange: true, type: "category" }),
  }, { click: clicked((p) => p.customdata?.[0]), relayout: zoomed });
}

function zoomed(change) {
  const range = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
  if (change["xaxis.autorange"]) drawTimeline();
  else if (Number.isFinite(range[0])) drawTimeline(range);
}

function drawMemory() {
  const names = run.memory.names.map((i) => escaped(tail(word(i), 60)));
  const traces = run.memory.kinds.map(([kind, bytes], i) => ({
    type: "scatter", mode: "lines", stackgroup: "all", name: kind, x: run.memory.at, y: bytes,
    line: { shape: "hv", width: 0.5, color: MORE[i % MORE.length] },
    customdata: bytes.map((n, j) => [quantity(n, "bytes"), names[j]]),
    hovertemplate: "%{customdata[0]}<extra>%{fullData.name}</extra>",
  }));
  if (traces.length) traces[0].hovertemplate = "%{customdata[1]}<br>%{customdata[0]}<extra>%{fullData.name}</extra>";
  plot("memory", traces, {
    height: 340,
    hovermode: "x unified",
    xaxis: axis({ title: { text: "nodes" } }),
    yaxis: axis({ tickformat: "~s", ticksuffix: "B", rangemode: "tozero" }),
  });
}

function draw() {
  if (data.runs.length > 1) drawComparison();
  drawTime();
  drawRoofline();
  drawTimeline();
  drawMemory();
}

function clicked(group) {
  return (event) => {
    const i = group(event.points[0]);
    if (Number.isInteger(i)) explain(i);
  };
}

// ---- the kernel table --------------------------------------------------------------------------

const number = (text) => (value, type) =>
  type === "display" || type === "filter" ? (value === null || value === undefined ? "" : text(value)) : value ?? -1;
const plainText = (value, type) => (type === "display" ? escaped(value) : value);

const COLUMNS = [
  { title: "layer", data: "name", render: (v, type) => (type === "display" ? `<button type="button" class="row">${escaped(v)}</button>` : v) },
  { title: "time", data: "all", render: number((v) => quantity(v, "s")), className: "figure" },
  { title: "share", data: "share", render: number((v) => percent(v)), className: "figure" },
  { title: "runs", data: "runs", render: number((v) => v.toLocaleString("en")), className: "figure" },
  { title: "each", data: "time", render: number((v) => quantity(v, "s")), className: "figure" },
  { title: "kernel", data: "kind", render: plainText },
  { title: "bound", data: "bound", render: plainText },
  { title: "of peak", data: "peak", render: number((v) => percent(v)), className: "figure" },
  { title: "80 %", data: "spread", orderable: false, className: "figure", render: plainText },
  { title: "waves", data: "waves", render: number((v) => significant(v, 2)), className: "figure" },
  { title: "occupancy", data: "occupancy", render: number((v) => percent(v)), className: "figure" },
  { title: "tile", data: "tile", render: plainText },
  { title: "shape", data: "shape", render: plainText },
  { title: "flop", data: "flops", render: number((v) => (v ? quantity(v, "flop") : "-")), className: "figure" },
  { title: "bytes", data: "bytes", render: number((v) => (v ? quantity(v, "bytes") : "-")), className: "figure" },
  { title: "dram", data: "dram", render: number((v) => (v ? quantity(v, "bytes") : "-")), className: "figure" },
  { title: "module", data: "module", render: plainText },
  { title: "phase", data: "phase", render: plainText },
];

let table = null;

function rows() {
  const row = (i, more) => {
    const g = run.groups[i];
    const made = { ...g, group: i, all: g.runs * g.time, module: "", spread: spread(g), ...more };
    return { ...made, share: made.all / run.latency };
  };
  if (chosen("rows") === "groups") return run.groups.map((_, i) => row(i, {}));
  return run.kernels.map(([i, name, , module, runs]) =>
    row(i, { name: word(name), module: word(module), runs, all: runs * run.groups[i].time }));
}

/** A choice of one value of a column, or any. */
function only(columns, name, shown) {
  const i = columns.findIndex((c) => c.data === name);
  const values = [...new Set(shown.map((r) => r[name]))].sort();
  const choice = element("select", {}, ...["any", ...values].map((v) => element("option", { value: v === "any" ? "" : v }, v)));
  choice.addEventListener("change", () => table.column(i).search(choice.value, { exact: Boolean(choice.value) }).draw());
  return element("label", { className: "only" }, `${columns[i].title} `, choice);
}

function drawTable(DataTable) {
  table?.destroy();
  const shown = rows();
  const used = (column) => !shown.length || shown.some((r) => r[column.data] !== null && r[column.data] !== "");
  const phases = new Set(shown.map((r) => r.phase)).size > 1;
  const columns = COLUMNS.filter((c) => (c.data === "phase" ? phases : used(c)));
  const place = find("table-place");
  place.replaceChildren(element("table", { id: "table" }));
  find("table").setAttribute("aria-label", "Kernels");
  find("table").setAttribute("aria-describedby", "hint");
  table = new DataTable("#table", {
    data: shown,
    columns: columns.map((c) => ({ ...c, orderSequence: c.className ? ["desc", "asc"] : ["asc", "desc"] })),
    order: [[columns.findIndex((c) => c.data === "all"), "desc"]],
    pageLength: 25,
    lengthMenu: [10, 25, 100, { label: "all", value: -1 }],
    autoWidth: false,
    layout: {
      topStart: ["search", ...["kind", "bound"].map((name) => only(columns, name, shown))], topEnd: "pageLength",
      bottomStart: "info", bottomEnd: "paging",
    },
    language: { search: "Search", searchPlaceholder: "name, kind, shape", lengthMenu: "_MENU_ rows" },
  });
  const region = element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Kernel table" });
  find("table").before(region);
  region.append(find("table"));
  find("table").addEventListener("click", (event) => {
    const row = event.target.closest("tbody tr");
    const found = row && table.row(row).data();
    if (found) explain(found.group, row.querySelector("button"), found.name);
  });
}

// ---- the explanation of one kernel -------------------------------------------------------------

let opener = null;

function pairs(list) {
  const made = element("dl", { className: "facts" });
  for (const [label, text] of list) if (text) made.append(element("dt", {}, label), element("dd", {}, text));
  return made;
}

function explain(i, from = null, name = null) {
  const g = run.groups[i];
  opener = from;
  find("explain-title").textContent = name ?? g.name;
  const nodes = g.nodes.map(word);
  const body = [
    pairs([
      ["kernel", `k.${g.kind}`],
      ["nest", g.shape],
      ["tile", g.schedule],
      ["time", `${quantity(g.time, "s", 4)} each: ${g.terms.map(([term, t]) => `${term} ${quantity(t, "s")}`).join(", ")}`],
      ["interval", g.interval && `${g.interval.map((end) => quantity(end, "s")).join(" to ")} in 80 % of cases`],
      ["runs", g.runs === 1 ? "" : `${g.runs.toLocaleString("en")}, ${quantity(g.runs * g.time, "s")} in all`],
      ["bound", `${g.bound}, says ${g.by}`],
      ["unseen", g.unseen.length ? `${g.unseen.join(", ")}: not in what it was fitted on` : ""],
      ["unfitted", g.unseen.includes("kind") ? "no measurements of such kernels: the interval is a factor" : ""],
      ["coverage", g.status === "modelled" ? "" : g.status],
      ["phase", g.phase === "forward" ? "" : g.phase],
      ["computes", nodes.slice(0, 12).join(", ") + (nodes.length > 12 ? ` and ${nodes.length - 12} more` : "")],
    ]),
    g.lines.length ? quantities(g.lines) : factTable(g.facts),
  ];
  find("explain-body").replaceChildren(...body);
  find("explain").showModal();
  find("explain-title").focus();
  find("explain-body").scrollTop = 0;
}

function tableOf(titles, lines) {
  const head = element("tr", {}, ...titles.map((t) => element("th", { scope: "col" }, t)));
  const body = lines.map(([first, ...rest]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...rest.map((cell) => element("td", {}, cell))));
  const made = element("table", { className: "plain left" }, element("thead", {}, head), element("tbody", {}, ...body));
  return element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Quantities behind the time" }, made);
}

const quantities = (lines) =>
  tableOf(["quantity", "value", "how"], lines.map(([name, value, unit, formula, source]) => {
    const how = element("span");
    if (formula) how.append(element("code", {}, `= ${formula}`));
    if (source) how.append(element("span", { className: "source" }, word(source)));
    return [word(name), measured(value, word(unit)), how];
  }));

const factTable = (facts) =>
  tableOf(["fact", "value"], facts.map(([name, value]) => [name.replaceAll("_", " "), plain(value)]));

find("explain-close").addEventListener("click", () => find("explain").close());
find("explain").addEventListener("click", (event) => {
  if (event.target === find("explain")) find("explain").close(); // beside it
});
find("explain").addEventListener("close", () => opener?.isConnected && opener.focus());

// ---- what a reader chooses ---------------------------------------------------------------------

const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;

function choose(i) {
  run = data.runs[i];
  for (const part of all(".run[data-run]")) part.hidden = part.dataset.run !== String(i);
  find("by-phase").hidden = !run.trees.phase;
  if (!run.trees.phase && chosen("tree") === "phase") document.querySelector("input[name=tree]").checked = true;
}

async function unpacked(id) {
  const bytes = Uint8Array.from(atob(find(id).textContent), (c) => c.charCodeAt(0));
  find(id).remove();
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function start() {
  document.head.append(element("script", { textContent: await unpacked("plotly") }));
  const code = new Blob([await unpacked("datatables")], { type: "text/javascript" });
  const { default: DataTable } = await import(URL.createObjectURL(code));
  const show = () => { draw(); drawTable(DataTable); };
  choose(0);
  show();
  find("run")?.addEventListener("change", (event) => { choose(event.target.value); show(); });
  find("tree").addEventListener("change", drawTime);
  find("rows").addEventListener("change", () => drawTable(DataTable));
  find("theme").addEventListener("change", (event) => {
    document.documentElement.style.colorScheme = event.target.value;
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => { printing = true; document.documentElement.classList.add("printing"); draw(); });
  addEventListener("afterprint", () => { printing = false; document.documentElement.classList.remove("printing"); draw(); });
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  find("main").prepend(element("p", { className: "notice", role: "alert" }, `The charts could not be drawn: ${error.message}`));
  throw error;
});
