// The chat page: a conversation that lives as long as its tab, and one streamed request for each answer.
"use strict";

import { codeBlock, showMarkdown } from "/markdown.js";

const part = (id) => document.getElementById(id);
const log = part("log");
const status = part("status");
const message = part("message");
const key = part("key");

const STOPPED = "stopped early";
const KEPT = ["system", "temperature", "limit"]; // settings that a reload keeps, beside the key

let turns = []; // {role, content, facts}, and what `turn` adds of an answer
let model = "";
let running = null; // the AbortController of the answer that comes in
let incoming = null; // that answer, as `show` returned it

key.value = sessionStorage.getItem("key") ?? "";

function headers() {
  const named = { "Content-Type": "application/json" };
  if (key.value) named.Authorization = `Bearer ${key.value}`;
  return named;
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answers ${response.status}`;
  }
}

async function connect() {
  status.textContent = "";
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await refusal(response));
    const found = (await response.json()).data[0];
    model = found.id;
    part("model").textContent = `${model}, ${found.context_length} tokens of context`;
  } catch (error) {
    model = "";
    part("model").textContent = "Not connected";
    status.textContent = error.message;
    if (/key/i.test(error.message)) {
      part("settings").open = true;
      key.focus();
    }
  }
}

function show({ role, content, facts = "", thought = "", calls = [] }) {
  const card = document.createElement("article");
  card.className = role;
  card.setAttribute("aria-label", role === "user" ? "You" : "The model");
  const words = document.createElement(role === "user" ? "p" : "div");
  const small = document.createElement("small");
  const copy = document.createElement("button");
  copy.type = "button";
  copy.className = "copy";
  copy.textContent = "Copy";
  const shown = { card, words, facts: small, copy, text: "", thought: "", thinking: null, calls: [], frame: 0 };
  card.append(words, small, copy);
  log.append(card);
  think(shown, thought);
  write(shown, content);
  for (const call of calls) addCall(shown, call);
  tell(shown, facts);
  copy.addEventListener("click", () => copyText(copy, shown.text));
  log.scrollTop = log.scrollHeight;
  return shown;
}

function write(shown, text) {
  shown.text = text;
  shown.copy.hidden = !text;
  if (shown.words.localName === "p") {
    shown.words.textContent = text;
    return;
  }
  draw(shown);
}

function draw(shown) {
  shown.frame ||= requestAnimationFrame(() => {
    const stays = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    shown.frame = 0;
    showMarkdown(shown.words, shown.text);
    if (shown.thinking) shown.thinking.lastChild.textContent = shown.thought;
    shown.calls.forEach(({ arguments: given, block }) => {
      block.querySelector("code").textContent = readable(given);
    });
    if (stays) log.scrollTop = log.scrollHeight;
  });
}

// What the model thinks, folded. It is text: nothing in it becomes markup.
function think(shown, thought) {
  if (!thought) return;
  shown.thought = thought;
  if (!shown.thinking) {
    const summary = document.createElement("summary");
    summary.textContent = "Thinking";
    shown.thinking = document.createElement("details");
    shown.thinking.className = "thinking";
    shown.thinking.append(summary, document.createElement("p"));
    shown.words.before(shown.thinking);
  }
  draw(shown);
}

function addCall(shown, { name, arguments: given }) {
  const block = codeBlock(name, []);
  block.classList.add("call");
  block.setAttribute("aria-label", "A call of a function");
  shown.facts.before(block);
  shown.calls.push({ name, arguments: given, block });
  draw(shown);
}

function addToCalls(shown, deltas) {
  for (const { index, function: { name, arguments: given } } of deltas) {
    if (index === shown.calls.length) addCall(shown, { name, arguments: given });
    else shown.calls[index].arguments += given;
  }
  draw(shown);
}

function readable(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch { // not whole yet
    return json;
  }
}

// An answer as it is kept. The model gets back its content only.
function turn({ text, thought, calls }, facts) {
  const kept = calls.map(({ name, arguments: given }) => ({ name, arguments: given }));
  return { role: "assistant", content: text, facts, thought, calls: kept };
}

function isEmpty({ text, thought, calls }) {
  return !text && !thought && !calls.length;
}

function tell(shown, facts) {
  shown.facts.textContent = facts;
  shown.facts.hidden = !facts;
}

async function copyText(button, text) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page that came without TLS from another machine has no clipboard
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    done = document.execCommand("copy");
    field.remove();
    button.focus();
  }
  button.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function keep() {
  const half = incoming && !isEmpty(incoming) ? [turn(incoming, STOPPED)] : [];
  const settings = Object.fromEntries(KEPT.map((id) => [id, part(id).value]));
  try {
    sessionStorage.setItem("conversation", JSON.stringify({ turns: [...turns, ...half], settings }));
  } catch {
    status.textContent = "This conversation is too long for the browser to keep over a reload.";
  }
}

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem("conversation") ?? "{}");
    for (const id of KEPT) part(id).value = kept.settings?.[id] ?? part(id).value;
    turns = (kept.turns ?? []).map(({ role, content, facts = "", thought = "", calls = [] }) => (
      { role, content, facts, thought, calls }
    ));
  } catch {
    turns = [];
  }
  if (turns.at(-1)?.role === "user") message.value = turns.pop().content; // it has no answer
  turns.forEach(show);
}

function busy(controller) {
  running = controller;
  part("send").hidden = controller !== null;
  part("stop").hidden = controller === null;
}

function routeText(route) {
  const hops = route.split(", ").filter(Boolean).map((hop) => {
    const [peer, blocks] = hop.split("=");
    const [first, end] = blocks.split(":").map(Number);
    return `…${peer.slice(-6)} (blocks ${first} to ${end - 1})`;
  });
  return hops.length === 1 ? `by ${hops[0]}` : `by ${hops.length} servers: ${hops.join(", ")}`;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const event of whole) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function ask() {
  const system = part("system").value.trim();
  return {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns.map(({ role, content }) => ({ role, content }))],
    temperature: Number(part("temperature").value),
    max_completion_tokens: Number(part("limit").value) || 512,
    stream: true,
    stream_options: { include_usage: true },
  };
}

async function answer(shown, controller) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(ask()),
    signal: controller.signal,
  });
  if (!response.ok) throw new Error(await refusal(response));
  let route = response.headers.get("X-Barnraise-Route") ?? "";
  const began = performance.now();
  let failovers = 0;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    for (const { delta } of event.choices) {
      think(shown, shown.thought + (delta.reasoning_content ?? ""));
      write(shown, shown.text + (delta.content ?? ""));
      addToCalls(shown, delta.tool_calls ?? []);
    }
    if (event.barnraise) ({ route, failovers } = event.barnraise);
    if (event.usage) {
      const seconds = (performance.now() - began) / 1000;
      const tokens = event.usage.completion_tokens;
      const rate = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} a second` : "";
      const replaced = failovers ? `; ${failovers} replaced` : "";
      tell(shown, `${tokens} tokens${rate}, ${routeText(route)}${replaced}`);
    }
  }
}

async function send() {
  const text = message.value.trim();
  if (!text || running) return;
  if (!model) await connect();
  if (!model) return;
  status.textContent = "";
  message.value = "";
  turns.push({ role: "user", content: text, facts: "" });
  const asked = show(turns.at(-1));
  const shown = show({ role: "assistant", content: "" });
  shown.card.classList.add("busy");
  const controller = new AbortController();
  busy(controller);
  const now = turns;
  incoming = shown;
  try {
    await answer(shown, controller);
  } catch (error) {
    if (error.name !== "AbortError") status.textContent = error.message;
  }
  shown.card.classList.remove("busy");
  if (running === controller) busy(null);
  if (turns !== now) return; // reset meanwhile
  incoming = null;
  if (!isEmpty(shown)) {
    if (!shown.facts.textContent) tell(shown, STOPPED);
    turns.push(turn(shown, shown.facts.textContent));
  } else {
    turns.pop(); // as if it had not been sent
    asked.card.remove();
    shown.card.remove();
    message.value = text;
  }
  keep();
  message.focus();
}

function reset() {
  running?.abort();
  busy(null);
  turns = [];
  incoming = null;
  keep();
  log.replaceChildren();
  status.textContent = "";
  message.focus();
}

part("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
part("stop").addEventListener("click", () => running?.abort());
part("reset").addEventListener("click", reset);
key.addEventListener("change", () => {
  sessionStorage.setItem("key", key.value);
  connect();
});
log.addEventListener("click", (event) => {
  const button = event.target.closest("figure .copy");
  if (button) copyText(button, button.closest("figure").querySelector("pre").textContent);
});
addEventListener("pagehide", keep);

restore();
connect();
