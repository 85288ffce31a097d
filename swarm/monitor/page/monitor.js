// The monitor's page: draws each state that the stream brings. Texts are strangers': only textContent, never markup.
"use strict";

const part = (id) => document.getElementById(id);

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  if (className) made.className = className;
  return made;
}

const claimed = () => element("span", KINDS.claims, "kind claims");
const words = (basis) => element("span", `(${basis.map((name) => KINDS[name]).join(", ")})`, "quiet");

const PUBLISHED = "published" in document.documentElement.dataset;
let state = null;
let received = 0;

const nameOf = (peer) => state.names[peer] || `…${shortId(peer)}`;

function drawHead() {
  const of = state.home ? state.home.kind : state.kind;
  const what = { run: "training run", model: "served model", unknown: "" }[of];
  part("name").textContent = state.name || "Barnraise";
  document.title = `${state.verdict.word} · ${state.name || "Barnraise"}`;
  const admission = of === "unknown" ? "" : state.open ? ", open to all" : ", by invitation";
  const method = state.method ? `, ${state.method}` : "";
  part("what").textContent = `${what} ${state.run_id}${admission}${method}`;
}

function drawVerdict() {
  const { level, word, reason, remedy, basis } = state.verdict;
  part("verdict").className = level;
  part("word").textContent = word;
  part("basis").replaceChildren(words(basis));
  part("reason").textContent = reason;
  part("remedy").textContent = remedy;
  part("cautions").replaceChildren(...state.cautions.map((text) => element("li", text)));
  part("cautions").hidden = !state.cautions.length;
}

function drawAlerts() {
  part("alerts-part").hidden = !state.alerts.length;
  part("alerts").replaceChildren(...state.alerts.map((alert) => {
    const item = element("li", "", alert.severity);
    item.append(element("strong", alert.severity), ` ${alert.text} (since ${clock(alert.since)}) `, words(alert.basis));
    item.append(element("p", alert.remedy));
    return item;
  }));
  const over = ["over", "unknown"].includes(state.verdict.level);
  part("help-wanted").textContent = state.help_wanted && !over ? `What helps most: ${state.help_wanted}.` : "";
}

// What the home keeps stands apart from what this monitor reads: it is of the past, and each fact has its age.
function drawKept() {
  const { home } = state;
  part("kept-part").hidden = !home;
  if (!home) return;
  const ago = (at) => (at === null ? "at an unknown time" : `${age(Math.max(0, state.at - at))} ago`);
  part("kept-written").textContent = `No peer answers. This is what the home on this machine holds; its peer wrote last ${ago(home.written_at)}.`;
  const of = home.rounds ? ` of ${home.rounds}` : "";
  const lines = home.round === null ? [] : [`Round ${home.round}${of} was committed${home.round && home.round === home.rounds ? ", the last one" : ""}.`];
  for (const head of home.heads) {
    const stage = home.heads.length > 1 || head.stage ? ` of stage ${head.stage}` : "";
    const members = head.members.slice(0, 8).map((peer) => home.names[peer] || `…${shortId(peer)}`).join(", ");
    const more = head.members.length > 8 ? ` and ${head.members.length - 8} more` : "";
    lines.push(`Last head${stage}: round ${head.round}, ${ago(head.at)}, state ${head.state_hash.slice(0, 8)}, ${count(head.tokens)} tokens; members ${members || "none"}${more}.`);
  }
  if (home.kind === "run" && !home.heads.length) lines.push("It holds no head.");
  part("kept").replaceChildren(...lines.map((text) => element("li", text)));
  part("kept-log").replaceChildren(...home.log.map((entry) => {
    const item = element("li");
    item.append(element("time", ago(entry.at)), entry.text);
    return item;
  }));
}

function line(name, text) {
  const made = element("p", `${text} `);
  if (name === "claims") made.append(claimed());
  return made;
}

function stageCard(stage) {
  const over = state.verdict.level === "over";
  const { facts, seen, claims } = stage;
  const margin = seen.margin;
  const card = element("article", "", `stage ${over || margin === null ? "" : margin < 0 ? "bad" : margin ? "" : "edge"}`);
  const whole = state.stages.length === 1;
  const blocks = `blocks ${stage.first} to ${stage.end - 1}`;
  card.append(element("h3", whole ? `Whole model, ${blocks}` : `Stage ${stage.stage}, ${blocks}`));
  if (facts) {
    const of = state.rounds_planned ? ` of ${state.rounds_planned}` : "";
    const tokens = facts.tokens ? `, ${count(facts.tokens)} tokens` : "";
    card.append(line("facts", `Round ${facts.round}${of}${tokens}`));
    if (facts.members) {
      card.append(line("facts", `${several(facts.members, "member")}, quorum ${facts.quorum}${facts.learners ? `, ${facts.learners} new` : ""}`));
      if (!over) card.append(line("seen", `${seen.answering} ${seen.answering === 1 ? "answers" : "answer"}, margin ${margin}`));
    }
  } else {
    card.append(line("seen", "No peer proves a commit"));
  }
  if (seen.commit_age_s !== null && facts && facts.round) {
    card.append(line("seen", seen.round_s ? `Last commit ${age(seen.commit_age_s)} ago, a round takes ${age(seen.round_s)}`
      : `Last commit at least ${age(seen.commit_age_s)} ago`));
  }
  const data = stage.stage === 0 ? state.data_set : null;
  if (data) {
    const epoch = `Epoch ${Math.floor(data.epochs) + 1} of the data set, ${count(data.tokens_left)} of ${count(data.tokens)} tokens left`;
    const waited = data.waited_s ? `; peers waited ${age(data.waited_s)} for pages in ten minutes` : "";
    card.append(line("facts", epoch));
    card.append(line("claims", `${data.rare} of ${several(data.ranges, "range")} of pages with fewer than two holders${waited}`));
  }
  const arriving = claims.arriving ? `, ${claims.arriving} arriving` : "";
  const rated = claims.rate ? `, ${claims.rate.toFixed(1)} micro-batches a second` : "";
  const queue = claims.queue === null ? "" : `, ${claims.queue.toFixed(1)} waiting at each`;
  if (claims.replicas || !over) card.append(line("claims", `${several(claims.replicas, "replica")}${arriving}${rated}${queue}`));
  const there = state.members.filter((m) => m.claims && m.claims.role !== "coordinator" && m.claims.role !== "feeder"
    && (whole || m.claims.stage === stage.stage));
  card.append(chips(there.map((m) => [m.claims.name, false])));
  return card;
}

function blockCard(row) {
  const card = element("article", "", `stage ${row.servers === 0 ? "bad" : row.servers === 1 ? "edge" : ""}`);
  card.append(element("h3", row.end - row.first === 1 ? `Block ${row.first}` : `Blocks ${row.first} to ${row.end - 1}`));
  const arriving = row.arriving ? `, ${row.arriving} loading` : "";
  const leaving = row.leaving ? `, ${row.leaving} leaving` : "";
  card.append(line("claims", `${several(row.servers, "server")}${arriving}${leaving}`));
  card.append(chips(row.peers.map((peer) => [nameOf(peer), false])));
  return card;
}

function chips(names) {
  const list = element("ul", "", "replicas");
  for (const [name] of names.slice(0, 24)) list.append(element("li", name));
  if (names.length > 24) list.append(element("li", `and ${names.length - 24} more`));
  return list;
}

function drawMap() {
  const model = state.kind === "model";
  part("map-title").textContent = model ? "Blocks" : state.stages.length > 1 ? "Stages" : "Group";
  const cards = model ? state.blocks.map(blockCard) : state.stages.map(stageCard);
  part("map").replaceChildren(...cards);
  part("map-part").hidden = !cards.length;
}

const pair = (up, down) => (up || down ? `${up || "–"} / ${down || "–"}` : "");

function doing(member) {
  const { claims, seen } = member;
  if (!claims) return "away";
  const trouble = { silent: "; tells no events", garbage: "; answers nonsense" }[seen.events] || "";
  const place = claims.stage === null ? "" : `stage ${claims.stage}, `;
  const blocks = claims.first === null ? "" : `blocks ${claims.first} to ${claims.end - 1}, `;
  return `${["full", "stage"].includes(claims.role) ? "" : `${claims.role}, `}${place}${blocks}${claims.phase}${trouble}`;
}

const COLUMNS = [
  ["Peer", "words", "claims", (m) => (m.claims ? m.claims.name : state.names[m.peer] || "")],
  ["Id", "", "facts", (m) => shortId(m.peer)],
  ["In the head", "", "facts", (m) => ({ member: "member", learner: "new", none: "" })[m.facts.membership]],
  ["Merged / missed", "number", "facts", (m) => (m.facts.merged + m.facts.missed ? `${m.facts.merged} / ${m.facts.missed}` : "")],
  ["Answers", "", "seen", (m) => (m.seen.answers ? "yes" : "no")],
  ["Does", "words", "claims", doing],
  ["Steps or micro-batches/s", "number", "claims", (m) => (m.claims && m.claims.speed ? m.claims.speed.toFixed(1) : "")],
  ["Loss", "number", "claims", (m) => (m.claims ? loss(m.claims.loss) : "")],
  ["Up / down a second", "number", "claims", (m) => (m.claims ? pair(size(m.claims.up_bytes_s), size(m.claims.down_bytes_s)) : "")],
  ["Up / down in all", "number", "claims", (m) => (m.claims ? `${size(m.claims.bytes_up)} / ${size(m.claims.bytes_down)}` : "")],
  ["Version", "", "claims", (m) => (m.claims ? m.claims.version : "")],
];
const SERVER_COLUMNS = [
  ...COLUMNS.slice(0, 2), ...COLUMNS.slice(4, 6),
  ["Sessions", "number", "claims", (m) => (m.claims && m.claims.sessions !== null ? String(m.claims.sessions) : "")],
  ["Cache used", "number", "claims", (m) => (m.claims && m.claims.kv_used !== null ? `${(100 * m.claims.kv_used).toFixed(0)} %` : "")],
  ["ms a step", "number", "claims", (m) => (m.claims && m.claims.step_ms !== null ? m.claims.step_ms.toFixed(1) : "")],
  ...COLUMNS.slice(8),
];

function drawMembers() {
  const columns = state.kind === "model" ? SERVER_COLUMNS : COLUMNS;
  part("members-title").textContent = state.kind === "model" ? "Servers" : "Members";
  const head = element("thead");
  const titles = element("tr");
  for (const [title, align, from] of columns) {
    const cell = element("th", `${title} `, align);
    cell.scope = "col";
    if (from === "claims") cell.append(claimed());
    titles.append(cell);
  }
  head.append(titles);
  const body = element("tbody");
  for (const member of state.members) {
    const row = element("tr", "", member.claims || state.verdict.level === "over" ? "" : "away");
    for (const [title, align, , text] of columns) {
      const cell = element("td", text(member), align);
      cell.dataset.label = title;
      row.append(cell);
    }
    row.title = member.peer;
    body.append(row);
  }
  part("members").replaceChildren(head, body);
  const more = state.monitor.members_left_out;
  part("left-out").textContent = more ? `${more} more are not shown.` : state.members.length ? "" : "No peer publishes a record.";
}

function roundLine(made) {
  const { facts, claims } = made;
  const of = state.stages.length > 1 ? ` of stage ${made.stage}` : "";
  const item = element("li");
  item.append(element("time", made.seen_at === null ? "earlier" : clock(made.seen_at)));
  if (made.starts_term) {
    item.append(`Term ${made.term}${of} began after round ${made.round} with ${several(facts.members, "member")}: ${names(facts.took_part.length ? facts.took_part : facts.joined)}`);
    return item;
  }
  item.append(`Round ${made.round}${of}: ${facts.took_part.length} took part`);
  if (facts.tokens) item.append(`, ${count(facts.tokens)} tokens`);
  if (facts.absent.length) item.append(element("span", `; absent: ${names(facts.absent)}`, "bad"));
  if (facts.joined.length) item.append(`; new: ${names(facts.joined)}`);
  if (facts.left.length) item.append(`; left: ${names(facts.left)}`);
  if (facts.discarded) item.append(element("span", `; ${several(facts.discarded, "attempt")} discarded`, "bad"));
  if (claims.failures.length) item.append(" (", claims.failures.join("; "), " ", claimed(), ")");
  if (claims.last && claims.behind_s >= 0.1) {
    item.append(`; last: ${nameOf(claims.last)}, ${claims.behind_s.toFixed(1)} s after the first `, claimed());
  }
  return item;
}

const names = (peers) => peers.slice(0, 8).map(nameOf).join(", ") + (peers.length > 8 ? ` and ${peers.length - 8} more` : "");

function drawRounds() {
  const run = state.stages.some((stage) => stage.facts); // by gossip there are no common rounds
  part("rounds-part").hidden = !run;
  part("rounds").replaceChildren(...state.rounds.map(roundLine));
  part("older").textContent = !state.rounds.length ? "No commit is proved yet."
    : state.monitor.history_complete ? "" : "Older rounds are still being read.";
}

function drawLog() {
  const lines = state.log.map((entry) => {
    const item = element("li");
    const more = entry.tellers.length > 1 ? ` (${entry.tellers.length} say so)` : "";
    item.append(element("time", clock(entry.at)), `${entry.text}${more}`);
    return item;
  });
  part("log").replaceChildren(...(lines.length ? lines : [element("li", "No peer has told an event yet.")]));
}

function drawWatch() {
  const watch = state.monitor;
  const took = watch.reading_s === null ? "" : `, the last one in ${watch.reading_s.toFixed(2)} s`;
  const lies = watch.lies ? `; ${watch.lies} false answers refused` : "";
  const failed = watch.failed ? `; ${watch.failed} failed` : "";
  part("watch").textContent = `This monitor looks since ${clock(watch.started_at)}: ${watch.readings} readings${took}${failed}${lies}.`;
}

function draw(next) {
  state = next;
  received = Date.now();
  for (const step of [drawHead, drawVerdict, drawAlerts, drawKept, drawMap, drawMembers, drawRounds, drawCharts, drawLog, drawWatch]) step();
  beat();
}

function beat() {
  if (!state) return;
  const seconds = Math.round((Date.now() - received) / 1000);
  if (PUBLISHED) {
    part("live").textContent = `as of ${moment(received / 1000)}${seconds > 300 ? `, ${age(seconds)} ago` : ""}`;
    return;
  }
  part("live").textContent = seconds > 30 ? `no news for ${age(seconds)}` : state.monitor.failure ? "tries on" : "live";
}

// What is remembered, of the span that is chosen.
const HISTORY_MS = 15_000;
let view = null;
let views = null; // of each span, on a page that is published

const chosenSpan = () => part("spans").elements.span.value;

async function fetchHistory() {
  if (PUBLISHED) {
    if (views) view = views[chosenSpan()];
    if (state) drawCharts();
    return;
  }
  const stage = part("stage").value || "0";
  try {
    const answer = await fetch(`api/v1/history?span=${chosenSpan()}&stage=${stage}`);
    if (answer.ok) view = await answer.json();
  } catch {
    return; // the stream says that the monitor is away
  }
  if (state) drawCharts();
}

function drawCharts() {
  const stages = state.stages.length;
  part("stage-choice").hidden = stages < 2 || PUBLISHED;
  for (let stage = part("stage").length; stage < stages; stage++) part("stage").append(element("option", String(stage)));
  const drawn = showCharts(part("charts"), view, state.loss, state.home ? state.home.losses : []);
  part("history-trouble").textContent = view && view.trouble ? `No history: ${view.trouble}.` : drawn ? "" : "Nothing is remembered yet.";
}

// A published page has no server behind it: its data are a script beside it, which calls this.
function barnraisePublished(data) {
  if (!views && data.state.verdict.level === "over") part("spans").elements.span.value = "all";
  views = data.views;
  view = views[chosenSpan()];
  draw(data.state);
  received = 1000 * data.at;
  beat();
}

function loadPublished() {
  const script = element("script");
  script.src = `data.js?${Date.now()}`;
  script.onload = () => script.remove();
  script.onerror = () => {
    script.remove();
    if (!state) part("what").textContent = "The data of this page are missing: data.js belongs beside it.";
  };
  document.head.append(script);
}

function follow() {
  const stream = new EventSource("api/v1/stream");
  stream.onmessage = (event) => draw(JSON.parse(event.data));
  stream.onerror = () => {
    part("live").textContent = "the monitor does not answer: is it still running?";
  };
  fetchHistory();
  setInterval(fetchHistory, HISTORY_MS);
}

part("spans").addEventListener("change", fetchHistory);
if (PUBLISHED) {
  const link = element("a", "JSON");
  link.href = "data.json";
  part("links").replaceChildren(link);
  loadPublished();
  setInterval(loadPublished, 60_000);
} else {
  follow();
}
setInterval(beat, 5000);
