// Who is signed in, and what they may do.
import { get, onSignedOut, post, remove } from "./api.js";
import { Source, useSource } from "./lib.js";

const INCLUDED_IN = {
  enqueue: ["enqueue", "admin"],
  read: ["read", "operate", "admin"],
  operate: ["operate", "admin"],
  admin: ["admin"],
};

class Session extends Source {
  // The answer of /v1/session; null until it is there.
  document = null;
  problem = null;

  constructor() {
    super();
    onSignedOut(() => this.load());
  }

  async load() {
    try {
      this.document = await get("/v1/session");
      this.problem = null;
    } catch (problem) {
      this.problem = problem;
    }
    this.tell();
  }

  async signIn(key) {
    this.document = await post("/v1/session", { key });
    this.tell();
  }

  async signOut() {
    await remove("/v1/session");
    await this.load();
  }

  /** Whether whoever is signed in may do this. The server checks it again. */
  may(scope) {
    if (!this.document) return false;
    if (!this.document.keys) return true;
    return INCLUDED_IN[scope].some((each) => this.document.scopes?.includes(each));
  }
}

export const session = new Session();

export function useSession() {
  useSource(session);
  return session;
}
