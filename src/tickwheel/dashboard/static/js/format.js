// Times, durations and numbers as people read them.

const NUMBER = new Intl.NumberFormat("en");
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (n) => (n === null || n === undefined ? "–" : NUMBER.format(n));
export const compact = (n) => (n === null || n === undefined ? "–" : n < 10_000 ? NUMBER.format(n) : COMPACT.format(n));
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

/** A rate per second. */
export function rate(n) {
  if (n === null || n === undefined) return "–";
  if (n === 0) return "0";
  return n >= 100 ? compact(Math.round(n)) : n >= 10 ? n.toFixed(1) : n.toFixed(2);
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  const value = share * 100;
  // Never all of it unless it is.
  const text = value >= 99 && value < 100 ? (Math.floor(value * 100) / 100).toFixed(2) : value.toFixed(value >= 10 ? 0 : 1);
  return `${text.replace(/\.0+$/, "")}%`;
}

const STEPS = [
  ["d", 86_400_000],
  ["h", 3_600_000],
  ["m", 60_000],
  ["s", 1000],
];

/** "1h 5m", "2.4 s", "3 ms": the two largest units. */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  const sign = ms < 0 ? "−" : "";
  const size = Math.abs(ms);
  if (size < 1000) return `${sign}${Math.round(size)} ms`;
  if (size < 60_000) return `${sign}${(size / 1000).toFixed(size < 10_000 ? 1 : 0).replace(/\.0$/, "")} s`;
  let left = Math.round(size / 1000) * 1000;
  const parts = [];
  for (const [unit, length] of STEPS) {
    if (left >= length && parts.length < 2) {
      parts.push(`${Math.floor(left / length)}${unit}`);
      left %= length;
    } else if (parts.length) break;
  }
  return sign + parts.join(" ");
}

/** "in 5m", "2h ago", "now". */
export function relative(at, now) {
  const ms = Date.parse(at) - now;
  if (Math.abs(ms) < 1000) return "now";
  return ms > 0 ? `in ${duration(ms)}` : `${duration(-ms)} ago`;
}

const pad = (n, length = 2) => String(n).padStart(length, "0");

/** The local time, as short as it can be told from others: "14:05:09", "Mar 3 14:05", "2027-03-03". */
export function local(at, { millis = false, now = Date.now() } = {}) {
  const date = new Date(at);
  const clock = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
  const exact = millis ? `${clock}.${pad(date.getMilliseconds(), 3)}` : clock;
  const today = new Date(now);
  if (date.toDateString() === today.toDateString()) return exact;
  const day = `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  return `${day} ${exact}`;
}

export const utc = (at) => `${new Date(at).toISOString().replace("T", " ").replace("Z", "")} UTC`;

export const zone = () => Intl.DateTimeFormat().resolvedOptions().timeZone;

const WEEKDAYS = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];

/** A wall clock elsewhere, from a time with its offset: "Mon 2027-03-29 02:00 +02:00". */
export function wallClock(there) {
  const [, day, clock, offset] = /^(\d{4}-\d\d-\d\d)T([\d:]{8})(?:\.\d+)?(.*)$/.exec(there);
  return `${WEEKDAYS[new Date(`${day}T00:00:00Z`).getUTCDay()]} ${day} ${clock.replace(/:00$/, "")} ${offset === "Z" ? "+00:00" : offset}`;
}

/** A duration as the API reads it, exactly: "1h30m", "500ms". */
export function durationText(ms) {
  if (!ms) return "";
  let left = ms;
  let text = "";
  for (const [unit, length] of [...STEPS, ["ms", 1]]) {
    if (left >= length) text += `${Math.floor(left / length)}${unit}`;
    left %= length;
  }
  return text;
}

export function bytes(n) {
  if (n === null || n === undefined) return "–";
  let size = n;
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (size < 1024) return `${unit === "B" ? size : size.toFixed(size < 10 ? 1 : 0)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} TB`;
}
