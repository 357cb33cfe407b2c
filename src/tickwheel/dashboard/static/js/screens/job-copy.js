// The step that would add the same job, as Python and as curl, correctly quoted for any text.
import { Exact, address } from "../api.js";

// What a terminal or an editor would hide or turn around is written as an escape.
const HIDDEN = /[\u0000-\u001f\u007f-\u00a0\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const SHORT = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };
const IDENTIFIER = /^[A-Za-z_]\w*$/;
const KEYWORDS = new Set(
  "False None True and as assert async await break class continue def del elif else except finally for from global if import in is lambda nonlocal not or pass raise return try while with yield".split(" "),
);

const escaped = (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`;

// --- Python

/** A JSON value as a Python expression. */
export function python(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "number" || value instanceof Exact) return String(value);
  if (typeof value === "string") return `"${value.replace(/["\\]/g, "\\$&").replace(HIDDEN, (char) => SHORT[char] ?? escaped(char))}"`;
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  return `{${Object.entries(value).map(([name, inner]) => `${python(name)}: ${python(inner)}`).join(", ")}}`;
}

/** Keyword arguments of a call. Names that are none in Python go in a dict. */
function keywords(values) {
  const entries = Object.entries(values);
  const named = entries.filter(([name]) => IDENTIFIER.test(name) && !KEYWORDS.has(name));
  const others = Object.fromEntries(entries.filter((entry) => !named.includes(entry) && !named.some(([name]) => name === entry[0])));
  const parts = named.map(([name, value]) => `${name}=${python(value)}`);
  return [...parts, ...(Object.keys(others).length ? [`**${python(others)}`] : [])].join(", ");
}

/** A program that adds the same job, by the HTTP API. */
export function asPython(job, { keys, now = Date.now() }) {
  const { at, ...rest } = options(job, now);
  const using = [keywords(rest), at && `at=datetime.fromisoformat(${python(at)})`].filter(Boolean).join(", ");
  const key = keys ? ', key=os.environ["TICKWHEEL_KEY"]' : "";
  return [
    ...(keys ? ["import os"] : []),
    ...(at ? ["from datetime import datetime"] : []),
    ...(at || keys ? [""] : []),
    "from tickwheel import HttpClient",
    "",
    `with HttpClient(${python(base())}${key}) as client:`,
    `    client.task(${python(job.task)})${using && `.using(${using})`}.enqueue(${keywords(argumentsOf(job))})`,
    "",
  ].join("\n");
}

// --- curl

/** A text as one word of a shell. */
export const shell = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** JSON with what would be hidden as escapes. */
const json = (value) => JSON.stringify(value).replace(HIDDEN, escaped);

export function asCurl(job, { keys, now = Date.now() }) {
  const body = { task: job.task, arguments: argumentsOf(job), ...options(job, now) };
  const lines = [`curl --fail-with-body ${shell(`${base()}/v1/jobs`)}`, `-H 'Content-Type: application/json'`];
  if (keys) lines.push('-H "Authorization: Bearer $TICKWHEEL_KEY"');
  return `${[...lines, `--data-raw ${shell(json(body))}`].join(" \\\n  ")}\n`;
}

// --- Both

const base = () => address("/").replace(/\/$/, "");

const argumentsOf = (job) => (job.arguments && typeof job.arguments === "object" && !Array.isArray(job.arguments) ? job.arguments : {});

/** What the job has beside its arguments. Without its id: with it, nothing would be added. */
function options(job, now) {
  const found = { queue: job.queue };
  if (job.priority !== "normal") found.priority = job.priority;
  if (job.retries !== null) found.retries = job.retries;
  if (job.timeout_ms !== null) found.timeout = job.timeout_ms / 1000;
  if (Object.keys(job.meta).length) found.meta = job.meta;
  // Counted from when it was first due: retries move its due time.
  const lasts = job.expires ? (Date.parse(job.expires) - Date.parse(job.history[0]?.due ?? job.due)) / 1000 : 0;
  if (lasts > 0) found.expires = lasts;
  if (Date.parse(job.due) > now) found.at = job.due;
  return found;
}
