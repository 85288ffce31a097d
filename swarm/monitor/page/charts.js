// The charts of the history, drawn by uPlot. What the monitor did not see is a gap, shaded.
"use strict";

const HEIGHT = 170;
const WHOLE_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6];
const whole = (value) => (Number.isInteger(value) ? String(value) : value.toFixed(1));

// Each with the columns that it draws: name in the view, label, color, and whether values stand alone.
const CHARTS = [
  { title: "Loss, nats a token", kinds: ["claims"], of: "losses", x: "round", text: loss,
    series: [["train", "train", "--train"], ["held_out", "held out", "--held", true]] },
  { title: "Loss, by the home's log", kinds: ["claims"], of: "kept", x: "round", text: loss,
    series: [["train", "train", "--train"], ["held_out", "held out", "--held", true]] },
  { title: "Round length", kinds: [], of: "rounds", x: "round", text: age, ticks: (v) => (v ? age(v) : "0"), zero: true,
    series: [["seconds", "length", "--train"]] },
  { title: "Tokens a second", kinds: [], of: "rounds", x: "round", text: (v) => count(Math.round(v)), zero: true,
    series: [["tokens_s", "tokens a second", "--train"]] },
  { title: "Contributions a round", kinds: [], of: "rounds", x: "round", text: whole, zero: true,
    series: [["merged", "merged", "--third"], ["absent", "missed", "--bad"]] },
  { title: "Peers", kinds: [], of: "samples", x: "at", text: whole, zero: true,
    series: [["peers", "peers, claimed", "--train"], ["members", "members", "--held"], ["answering", "answer", "--third"]] },
  { title: "Bytes a second, all peers", kinds: ["claims"], of: "samples", x: "at", text: rate, ticks: size, zero: true,
    series: [["up", "up", "--train"], ["down", "down", "--held"]] },
  { title: "Loss that peers claim now", kinds: ["claims"], of: "samples", x: "at", text: loss, instead: "losses",
    series: [["loss", "median", "--train"]] },
  { title: "Sessions", kinds: ["claims"], of: "samples", x: "at", text: whole, zero: true,
    series: [["sessions", "sessions", "--train"]] },
  { title: "Blocks without a server", kinds: ["claims"], of: "samples", x: "at", text: whole, zero: true,
    series: [["unserved", "blocks", "--bad"]] },
];

const shown = new Map(); // by title: figure, plot and what they were made for
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Draw what there is into the box. Return how many charts that are.
function showCharts(box, view, losses, kept) {
  const tables = view ? { samples: view.samples, rounds: view.rounds, losses: view.losses } : { samples: {}, rounds: {}, losses: {} };
  if (!tables.losses.round) tables.losses = lossTable(losses);
  tables.kept = lossTable(kept);
  let drawn = 0;
  for (const chart of CHARTS) {
    const table = tables[chart.of];
    const series = chart.series.filter(([name]) => (table[name] || []).some((value) => value !== null));
    const wanted = series.length && !(chart.instead && tables[chart.instead].round);
    const old = shown.get(chart.title);
    const made = series.map(([name]) => name).join();
    if (old && (!wanted || old.made !== made)) {
      old.observer.disconnect();
      old.plot.destroy();
      old.figure.remove();
      shown.delete(chart.title);
    }
    if (!wanted) continue;
    const data = [table[chart.x], ...series.map(([name]) => table[name])];
    const limits = chart.x === "at" ? [view.since, view.until] : null;
    const entry = shown.get(chart.title) || addChart(chart, series, made, data, limits);
    entry.limits = limits;
    entry.plot.setData(data);
    entry.caption.textContent = summary(chart, series, data);
    if (box.children[drawn] !== entry.figure) box.insertBefore(entry.figure, box.children[drawn] || null);
    if (!entry.observed) {
      entry.observed = true;
      entry.observer.observe(entry.figure);
    }
    drawn++;
  }
  return drawn;
}

function lossTable(points) {
  const column = (name) => points.map((point) => point[name]);
  return points.length ? { round: column("round"), train: column("train"), held_out: column("held_out") } : {};
}

function addChart(chart, series, made, data, limits) {
  const figure = document.createElement("figure");
  figure.className = "chart";
  const title = document.createElement("h3");
  title.textContent = `${chart.title} `;
  for (const name of chart.kinds) {
    const badge = document.createElement("span");
    badge.className = `kind ${name}`;
    badge.textContent = KINDS[name];
    title.append(badge, " ");
  }
  const place = document.createElement("div");
  place.className = "plot";
  place.tabIndex = 0;
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", `${chart.title}; the left and right arrow keys read values`);
  const caption = document.createElement("figcaption");
  caption.className = "quiet";
  figure.append(title, place, caption);
  const entry = { figure, caption, made, limits };
  entry.plot = new uPlot(options(chart, series, entry), data, place);
  place.addEventListener("keydown", (event) => moveCursor(event, entry.plot));
  entry.observer = new ResizeObserver(() => {
    const width = place.clientWidth;
    if (width && width !== entry.plot.width) entry.plot.setSize({ width, height: HEIGHT });
  });
  shown.set(chart.title, entry);
  return entry;
}

function options(chart, series, entry) {
  const time = chart.x === "at";
  const reach = (low, high) => (low === high ? [low - 1, high + 1] : [low, high]);
  const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 } };
  return {
    width: 320,
    height: HEIGHT,
    padding: [10, 20, 0, 0],
    cursor: { drag: { x: false, y: false }, points: { size: 7 } },
    scales: {
      x: { time, range: (plot, low, high) => entry.limits || reach(low, high) },
      y: { range: (plot, low, high) => (low === null ? [0, 1] : chart.zero ? [0, high * 1.1 || 1] : uPlot.rangeNum(low, high, 0.1, true)) },
    },
    axes: [
      { ...axis, size: 30, space: time ? 64 : 34, ...(time ? { values: timeTicks } : { incrs: WHOLE_STEPS, values: (plot, ticks) => ticks.map(count) }) },
      { ...axis, size: 70, ...(chart.text === whole ? { incrs: WHOLE_STEPS } : {}), values: (plot, ticks) => ticks.map(chart.ticks || chart.text) },
    ],
    series: [
      { label: time ? "at" : "round", value: (plot, x) => (x === null ? "" : time ? moment(x) : String(x)) },
      ...series.map(([, label, name, alone]) => ({
        label,
        stroke: color(name),
        width: 2,
        ...(alone ? { paths: () => null, points: { show: true, size: 6, fill: color(name) } } : {}),
        value: (plot, value) => (value === null || value === undefined ? "–" : chart.text(value)),
      })),
    ],
    hooks: { drawClear: [shadeGaps] },
  };
}

// Times of day, with seconds where the ticks are so close; days where the ticks are days.
function timeTicks(plot, ticks, axis, space, step) {
  const day = step >= 86_400;
  const form = day ? { day: "numeric", month: "short" } : { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}), hourCycle: "h23" };
  return ticks.map((at) => new Date(1000 * at).toLocaleString([], form));
}

// The rows between values that have none themselves: nothing is known of the time from the row before to the one behind.
function gapsOf([x, ...columns]) {
  const known = x.map((_, row) => row).filter((row) => columns.some((column) => column[row] !== null));
  return x.map((_, row) => row).filter((row) => row > known[0] && row < known.at(-1) && columns.every((column) => column[row] === null));
}

function shadeGaps(plot) {
  plot.ctx.save();
  plot.ctx.fillStyle = color("--gap");
  const [x] = plot.data;
  for (const row of gapsOf(plot.data)) {
    const left = Math.max(plot.bbox.left, plot.valToPos(x[row - 1], "x", true));
    const right = Math.min(plot.bbox.left + plot.bbox.width, plot.valToPos(x[row + 1], "x", true));
    if (right > left) plot.ctx.fillRect(left, plot.bbox.top, right - left, plot.bbox.height);
  }
  plot.ctx.restore();
}

function summary(chart, series, data) {
  const last = series.map(([, label], place) => {
    const row = data[place + 1].findLastIndex((value) => value !== null);
    return `${label} ${chart.text(data[place + 1][row])}${chart.text === loss && chart.x === "round" ? ` (round ${data[0][row]})` : ""}`;
  });
  const gaps = chart.x === "at" ? gapsOf(data).length : 0;
  const looked = gaps === 0 ? "" : gaps === 1 ? "; one gap, when the monitor did not look" : `; ${gaps} gaps, when the monitor did not look`;
  return `Last: ${last.join(", ")}${looked}.`;
}

function moveCursor(event, plot) {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const rows = plot.data[0].length;
  if (!step || !rows) return;
  event.preventDefault();
  const before = plot.cursor.idx ?? (step > 0 ? -1 : rows);
  const row = Math.max(0, Math.min(rows - 1, before + step));
  plot.setCursor({ left: plot.valToPos(plot.data[0][row], "x"), top: HEIGHT / 3 });
}

// Colors are read once, when a chart is made.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const entry of shown.values()) {
    entry.observer.disconnect();
    entry.plot.destroy();
    entry.figure.remove();
  }
  shown.clear();
  if (state) drawCharts();
});
