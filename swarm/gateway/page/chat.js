// The chat page: a conversation in this tab's memory, and one streamed request for each answer.
"use strict";

const part = (id) => document.getElementById(id);
const log = part("log");
const status = part("status");
const message = part("message");
const key = part("key");

let turns = []; // {role, content}
let model = "";
let running = null; // the AbortController of the answer that comes in

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

function show(role, text) {
  const card = document.createElement("article");
  card.className = role;
  card.setAttribute("aria-label", role === "user" ? "You" : "The model");
  const words = document.createElement("p");
  const facts = document.createElement("small");
  words.textContent = text; // never as markup: a model wrote it
  facts.hidden = true;
  card.append(words, facts);
  log.append(card);
  log.scrollTop = log.scrollHeight;
  return { card, words, facts };
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
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
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
    const stays = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    for (const choice of event.choices) shown.words.textContent += choice.delta.content ?? "";
    if (event.barnraise) ({ route, failovers } = event.barnraise);
    if (event.usage) {
      const seconds = (performance.now() - began) / 1000;
      const tokens = event.usage.completion_tokens;
      const rate = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} a second` : "";
      const replaced = failovers ? `; ${failovers} replaced` : "";
      shown.facts.textContent = `${tokens} tokens${rate}, ${routeText(route)}${replaced}`;
      shown.facts.hidden = false;
    }
    if (stays) log.scrollTop = log.scrollHeight;
  }
}

async function send() {
  const text = message.value.trim();
  if (!text || running) return;
  if (!model) await connect();
  if (!model) return;
  status.textContent = "";
  message.value = "";
  turns.push({ role: "user", content: text });
  const asked = show("user", text);
  const shown = show("assistant", "");
  shown.card.classList.add("busy");
  const controller = new AbortController();
  busy(controller);
  const now = turns;
  try {
    await answer(shown, controller);
  } catch (error) {
    if (error.name !== "AbortError") status.textContent = error.message;
  }
  shown.card.classList.remove("busy");
  if (running === controller) busy(null);
  if (turns !== now) return; // reset meanwhile
  if (shown.words.textContent) {
    turns.push({ role: "assistant", content: shown.words.textContent });
  } else {
    turns.pop(); // as if it had not been sent
    asked.card.remove();
    shown.card.remove();
    message.value = text;
  }
  message.focus();
}

function reset() {
  running?.abort();
  busy(null);
  turns = [];
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

connect();
