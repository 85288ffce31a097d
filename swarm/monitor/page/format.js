// Numbers as short texts, and the words for the kinds of knowledge. The page's scripts are no modules: a browser loads none from a file.
"use strict";

const KINDS = { facts: "proved", seen: "seen", claims: "claimed" };

const shortId = (peer) => peer.slice(-6);

function count(value) {
  for (const [unit, of] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= of) return `${(value / of).toFixed(1)} ${unit}`;
  }
  return String(value);
}

function size(bytes) {
  if (bytes === null) return "";
  for (const [unit, of] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= of) return `${(bytes / of).toFixed(1)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

const several = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;

const rate = (bytes) => (bytes === null ? "" : `${size(bytes)}/s`);

const loss = (value) => (value === null ? "" : value.toFixed(3));

function age(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)}\u00a0s`;
  if (seconds < 120) return `${Math.round(seconds)}\u00a0s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)}\u00a0min`;
  return seconds < 172_800 ? `${(seconds / 3600).toFixed(1)}\u00a0h` : `${Math.round(seconds / 86_400)}\u00a0days`;
}

const clock = (at) => new Date(1000 * at).toLocaleTimeString([], { hour12: false });
const moment = (at) => new Date(1000 * at).toLocaleString([], { hourCycle: "h23", dateStyle: "short", timeStyle: "medium" });
