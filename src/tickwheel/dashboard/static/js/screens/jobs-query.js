// What is looked for: as the text of the search box, as the query of the page, and as that of the API.

// Waiting: scheduled, ready or retrying. For the API it is a state; the others are its views.
export const VIEWS = ["waiting", "scheduled", "ready", "running", "retrying", "done", "dead", "cancelled"];
export const ENDED_VIEWS = ["done", "dead", "cancelled"];
// The names in the URL of the page. `from` and `until` are ISO dates or times, or distances from now as "-1h" and "+10m".
export const FIELDS = ["queue", "task", "worker", "meta", "from", "until", "text"];
export const KEYS = ["queue", "task", "worker", "id", "view", "meta.", "due<", "due>", "ended<", "ended>", "from", "until"];

const UNITS = { ms: 1, s: 1000, m: 60_000, h: 3_600_000, d: 86_400_000, w: 604_800_000 };
const LENGTH = /^(\d+(\.\d+)?(ms|s|m|h|d|w))+$/;
const DISTANCE = /^[+-](\d+(\.\d+)?(ms|s|m|h|d|w))+$/;
const ISO = /^(\d{4})-(\d\d)-(\d\d)(T\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:\d\d)?)?$/;
// The years 1 to 9999: what the API can read.
const EARLIEST = Date.parse("0001-01-01T00:00:00Z");
const LATEST = Date.parse("9999-12-31T23:59:59Z");

// --- Words of the search box

/** The words of a text, each with its raw form: `task:"a b" c` has two. A backslash in quotes escapes. */
export function words(text) {
  const found = [];
  let raw = "";
  let start = 0;
  let quoted = false;
  for (let at = 0; at <= text.length; at += 1) {
    const char = text[at];
    if (char === undefined || (char === " " && !quoted)) {
      if (raw) found.push({ raw, start, end: at });
      raw = "";
      start = at + 1;
      continue;
    }
    raw += char;
    if (quoted && char === "\\" && at + 1 < text.length) raw += text[++at];
    else if (char === '"') quoted = !quoted;
  }
  return found;
}

const unquoted = (raw) => raw.replace(/"((?:\\.|[^"\\])*)("|$)/gs, (_, inner) => inner.replace(/\\(.)/gs, "$1"));

const inQuotes = (text) => `"${text.replace(/["\\]/g, "\\$&")}"`;

const quoted = (text) => (/[\s":<>\\]/.test(text) || text === "" ? inQuotes(text) : text);

const WORD = /^(queue|task|worker|id|view|from|until):(.*)$/s;
const META = /^meta\.((?:"(?:\\.|[^"\\])*"|[^":\s])+)[:=](.*)$/s;
const WHEN = /^(due|ended)([<>]):?(.*)$/s;

/** What the text of the search box asks for, as fields of the page's query (and `id`). */
export function parse(text) {
  const fields = {};
  const free = [];
  for (const { raw } of words(text)) {
    const word = WORD.exec(raw);
    const meta = META.exec(raw);
    const when = WHEN.exec(raw);
    if (word && unquoted(word[2])) fields[word[1]] = unquoted(word[2]);
    else if (meta) fields.meta = `${unquoted(meta[1])}=${unquoted(meta[2])}`;
    else if (when && unquoted(when[3])) Object.assign(fields, bound(when));
    else free.push(unquoted(raw));
  }
  if (free.length) fields.text = free.join(" ");
  return fields;
}

/** `due<10m`: within ten minutes from now. `ended<1h`: less than an hour ago. What is no time is kept, to be refused. */
function bound([, what, sign, raw]) {
  const value = unquoted(raw);
  const early = sign === "<";
  const length = value.replace(/^[+-]/, "");
  if (what === "ended" && LENGTH.test(length)) return { [early ? "from" : "until"]: `-${length}` };
  return { [early ? "until" : "from"]: LENGTH.test(value) ? `+${value}` : value };
}

/** The text of the search box for a query. */
export function compose(query) {
  const parts = [];
  for (const name of ["queue", "task", "worker", "from", "until"]) if (query[name]) parts.push(`${name}:${quotedValue(query[name])}`);
  if (query.meta) {
    const [name, ...value] = query.meta.split("=");
    parts.push(`meta.${quoted(name)}:${quotedValue(value.join("="))}`);
  }
  if (query.text) parts.push(isFree(query.text) ? query.text : inQuotes(query.text));
  return parts.join(" ");
}

/** Whether a text means itself, without quotes. */
function isFree(text) {
  const { text: free, ...others } = parse(text);
  return free === text && Object.keys(others).length === 0;
}

// After its key a value may hold anything but spaces and quotes.
const quotedValue = (text) => (/[\s"\\]/.test(text) || text === "" ? quoted(text) : text);

// --- Suggestions

/** What the word at the caret may become: `known` has the queues, tasks, workers and meta names. */
export function suggestions(text, caret, known) {
  const word = words(text).find(({ start, end }) => start < caret && caret <= end) ?? { raw: "", start: caret, end: caret };
  const [, key, value] = /^([a-z]+):(.*)$/s.exec(word.raw) ?? [];
  const options = key && key in known ? starting(known[key], unquoted(value)).map((each) => `${key}:${quotedValue(each)}`) : keys(word.raw, known);
  const listed = options.filter((each) => each !== word.raw).slice(0, 14);
  return { from: word.start, to: word.end, options: listed };
}

function keys(raw, known) {
  const names = known.meta.map((name) => `meta.${quoted(name)}:`);
  const plain = KEYS.filter((key) => key !== "meta." || names.length === 0).map((key) => (/[<>.]$/.test(key) ? key : `${key}:`));
  const found = [...plain, ...names].filter((each) => each.startsWith(raw));
  // A bare word may be the name of a queue or a task.
  if (raw.length > 1) {
    for (const kind of ["queue", "task"]) found.push(...starting(known[kind], raw).map((each) => `${kind}:${quotedValue(each)}`));
  }
  return found;
}

function starting(names, text) {
  const wanted = text.toLowerCase();
  const first = names.filter((name) => name.toLowerCase().startsWith(wanted));
  return [...first, ...names.filter((name) => !first.includes(name) && name.toLowerCase().includes(wanted))];
}

// --- Times

/** The moment that a bound means, in milliseconds; null if it is no time. Without a zone it is local time. */
export function moment(text, now) {
  const at = DISTANCE.test(text) ? now + distance(text) : calendar(text);
  return at >= EARLIEST && at <= LATEST ? at : null;
}

function distance(text) {
  let ms = 0;
  for (const [, size, , unit] of text.matchAll(/(\d+(\.\d+)?)(ms|s|m|h|d|w)/g)) ms += Number(size) * UNITS[unit];
  return text.startsWith("-") ? -ms : ms;
}

function calendar(text) {
  const [, year, month, day, time] = ISO.exec(text) ?? [];
  // The 31st of a shorter month would be read as a day of the next.
  if (!year || new Date(Date.UTC(year, month - 1, day)).getUTCDate() !== Number(day)) return NaN;
  return Date.parse(time ? text : `${text}T00:00`);
}

/** What is wrong with a query, in words; null if nothing is. */
export function fault(query) {
  if (query.view && !VIEWS.includes(query.view)) return `view:${query.view} is no view: use ${VIEWS.join(", ")}.`;
  if (query.meta && !query.meta.includes("=")) return `meta ${query.meta} has no value: write name=value.`;
  for (const name of ["from", "until"]) {
    const text = query[name];
    if (!text || moment(text, Date.now()) !== null) continue;
    const hint = LENGTH.test(text)
      ? `write -${text} for that long ago, or +${text} for that long from now`
      : "write a distance from now, such as -1h or +10m, or a date or time, such as 2026-11-18 or 2026-11-18T10:00";
    return `${name}:${text} is no time: ${hint}.`;
  }
  return null;
}

const iso = (ms) => new Date(ms).toISOString();

// --- What the API is asked

/** The query of the API for that of the page; distances are from `now`. Throws if it has a fault: nothing is left out. */
export function asked(query, now) {
  const wrong = fault(query);
  if (wrong) throw new Error(wrong);
  const found = query.view ? { [query.view === "waiting" ? "state" : "view"]: query.view } : {};
  for (const name of FIELDS) if (query[name]) found[name] = query[name];
  for (const name of ["from", "until"]) if (found[name]) found[name] = iso(moment(found[name], now));
  return found;
}

/** The same as the filter of a bulk operation. Of ended jobs only those before `start`: so it comes to an end. */
export function filterOf(query, start) {
  const { meta, ...filter } = asked(query, start);
  if (meta) {
    const [name, ...value] = meta.split("=");
    filter.meta = { [name]: value.join("=") };
  }
  if (ENDED_VIEWS.includes(filter.view)) {
    const until = filter.until ? Math.min(Date.parse(filter.until), start) : start;
    filter.until = iso(until);
  }
  return filter;
}
