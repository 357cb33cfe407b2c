// Requests to the HTTP API, and what its answers mean.

/** A number that JavaScript would round: shown as it was sent. */
export class Exact {
  constructor(text) {
    this.text = text;
  }
  toJSON() {
    return JSON.rawJSON ? JSON.rawJSON(this.text) : this.text;
  }
  toString() {
    return this.text;
  }
}

/** What the API says when it refuses or fails (RFC 9457). */
export class Problem extends Error {
  constructor(status, document) {
    super(document.detail || document.title || `the server answered ${status}`);
    this.status = status;
    this.title = document.title || "";
    this.type = document.type || "";
    this.requestId = document.request_id || "";
  }
}

/** Decode JSON and keep numbers that don't fit into a double. */
export function decode(text) {
  return JSON.parse(text, (_, value, context) => {
    if (typeof value !== "number" || context?.source === undefined) return value;
    const plain = Number.isInteger(value) ? Number.isSafeInteger(value) : sameNumber(value, context.source);
    return plain ? value : new Exact(context.source);
  });
}

function sameNumber(value, source) {
  return String(value) === source || Number.isFinite(value) && source.replace(/[^0-9]/g, "").length <= 15;
}

/** An address below the path that the dashboard is served under. */
export function address(path) {
  return new URL(path.replace(/^\//, ""), document.baseURI).href;
}

const listeners = new Set();

/** Called when a request is refused because nobody is signed in. */
export function onSignedOut(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export async function request(method, path, body) {
  const options = { method, headers: { Accept: "application/json" }, credentials: "same-origin" };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(address(path), options);
  } catch {
    throw unreachable();
  }
  return answerOf(response, path);
}

/** Whether a stream would be let in, without reading it; throws why not. */
export async function probe(path) {
  const stop = new AbortController();
  let response;
  try {
    response = await fetch(address(path), { credentials: "same-origin", signal: stop.signal });
  } catch {
    throw unreachable();
  }
  if (response.ok) stop.abort();
  else await answerOf(response, path);
}

const unreachable = () => new Problem(0, { detail: "The server can't be reached." });

async function answerOf(response, path) {
  const text = await response.text();
  let content = null;
  try {
    content = text ? decode(text) : null;
  } catch {
    content = { detail: text.slice(0, 200) };
  }
  if (response.ok) return content;
  if (response.status === 401 && path !== "/v1/session") listeners.forEach((listener) => listener());
  throw new Problem(response.status, content ?? {});
}

export const get = (path) => request("GET", path);
export const post = (path, body) => request("POST", path, body);
export const put = (path, body) => request("PUT", path, body);
export const remove = (path) => request("DELETE", path);

/** A path with its query: what is null, undefined or empty is left out. */
export function withQuery(path, query) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") parts.append(name, value);
  }
  const text = parts.toString();
  return text ? `${path}?${text}` : path;
}

/** A name or an id as a part of a path. */
export const part = encodeURIComponent;
