// Numbers as short texts.
export const shortId = (peer) => peer.slice(-6);

export function count(value) {
  for (const [unit, of] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= of) return `${(value / of).toFixed(1)} ${unit}`;
  }
  return String(value);
}

export function size(bytes) {
  if (bytes === null) return "";
  for (const [unit, of] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= of) return `${(bytes / of).toFixed(1)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

export const rate = (bytes) => (bytes === null ? "" : `${size(bytes)}/s`);

export const loss = (value) => (value === null ? "" : value.toFixed(3));

export function age(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export const clock = (at) => new Date(1000 * at).toLocaleTimeString([], { hour12: false });
