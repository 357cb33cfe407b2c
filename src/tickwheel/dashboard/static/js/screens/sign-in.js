// Who are you? Shown in place of any screen until that is known; the address stays.
import { html, useEffect, useRef, useState } from "../lib.js";
import { route } from "../router.js";
import { session, useSession } from "../session.js";
import { Environment, logo } from "../shell.js";

export function SignIn() {
  const { document: who } = useSession();
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);

  const submit = async (event) => {
    event.preventDefault();
    const key = field.current.value.trim();
    if (!key || busy) return;
    setBusy(true);
    setProblem(null);
    try {
      await session.signIn(key);
      if (route.path === "/sign-in") route.go("/", { replace: true });
    } catch (found) {
      setProblem(found.status === 401 ? "This key is not valid: it may be mistyped, revoked or expired." : found.message);
      setBusy(false);
      field.current.select();
    }
  };

  return html`<main class="sign-in">
    <form class="panel" onSubmit=${submit}>
      <div class="sign-in-brand"><img src=${logo()} alt="" /><span>Tickwheel</span><${Environment} environment=${who.environment} /></div>
      <h1 tabindex="-1">Sign in</h1>
      <label class="field"><span>API key</span>
        <input ref=${field} class="input mono" type="password" name="key" required autocomplete="off" autocapitalize="off" spellcheck=${false}
          placeholder="tw_…" aria-describedby="sign-in-problem sign-in-help" aria-invalid=${problem ? "true" : undefined} />
      </label>
      <p id="sign-in-problem" class="problem" role="alert">${problem}</p>
      <button class="button main" disabled=${busy}>${busy ? "Signing in…" : "Sign in"}</button>
      <p id="sign-in-help" class="quiet">No key? Somebody with access to the store creates one: <code>tickwheel keys create NAME --scope read</code></p>
    </form>
    <footer class="quiet">Tickwheel ${who.version}</footer>
  </main>`;
}
