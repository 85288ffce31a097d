// The losses as a small SVG: two lines over rounds.
const SPACE = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [600, 200, 46, 8, 12, 22];

function shape(tag, attributes, text = "") {
  const made = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

export function lossChart(points) {
  const values = points.flatMap((p) => [p.train, p.held_out]).filter((v) => v !== null);
  if (!values.length) return [];
  const rounds = points.map((p) => p.round);
  const [first, last] = [Math.min(...rounds), Math.max(...rounds)];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (round) => LEFT + ((round - first) / (last - first || 1)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + ((high - value) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM);
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  svg.setAttribute("aria-label", `Loss from round ${first} to round ${last}, between ${low.toFixed(3)} and ${high.toFixed(3)}`);
  for (const [key, name] of [["train", "train"], ["held_out", "held"]]) {
    const known = points.filter((p) => p[key] !== null);
    const line = known.map((p) => `${x(p.round).toFixed(1)},${y(p[key]).toFixed(1)}`).join(" ");
    if (known.length > 1) svg.append(shape("polyline", { points: line, class: name }));
    if (known.length === 1) svg.append(shape("circle", { cx: x(known[0].round), cy: y(known[0][key]), r: 3, class: name }));
  }
  svg.append(shape("text", { x: 4, y: TOP + 4 }, high.toFixed(2)), shape("text", { x: 4, y: HEIGHT - BOTTOM }, low.toFixed(2)));
  svg.append(shape("text", { x: LEFT, y: HEIGHT - 6 }, `round ${first}`));
  svg.append(shape("text", { x: WIDTH - RIGHT, y: HEIGHT - 6, "text-anchor": "end" }, `round ${last}; dashed: held out`));
  return [svg];
}
