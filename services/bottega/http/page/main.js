// The page: its head, its messages, the view that is shown, and the dialog for the API key.

import { html, nothing, render } from "./vendor/lit-html.js";
import { setKey } from "./api.js";
import { loadLists, watchConnection } from "./connection.js";
import { afterDraw, choose, editView } from "./edit.js";
import { fleetView, watchFleet } from "./fleet.js";
import { requestForm } from "./form.js";
import { forgetHistory, historyView, loadHistory } from "./history.js";
import { leave, start } from "./job.js";
import { show, startRouter, VIEWS, whenShown } from "./router.js";
import { stage } from "./stage.js";
import { onChange, state, update } from "./store.js";

const root = document.getElementById("page");

const CONNECTION = {
  away: "Bottega cannot be reached. This page tries again until it can; what you wrote stays here.",
  gateway: "The gateway does not answer. Jobs that it has accepted go on when it is back; this page tries again.",
};

function page() {
  return html`
    <a class="skip" href="#main" @click=${skip}>Skip to the content</a>
    <header>
      <h1><img src="/page/icon.svg" alt="" width="28" height="28" /> Bottega</h1>
      <nav aria-label="Views">
        ${Object.entries(VIEWS).map(
          ([view, title]) =>
            html`<a href="#${view}" aria-current=${state.view === view ? "page" : "false"}>${title}</a>`,
        )}
      </nav>
      <button type="button" class="quiet key" @click=${() => update({ keyShown: true })}>
        ${state.hasKey ? "API key set" : "API key"}
      </button>
    </header>
    <p class="sr-only" role="status" aria-live="polite">${state.notice}</p>
    ${CONNECTION[state.connection] ? html`<p class="banner">${CONNECTION[state.connection]}</p>` : nothing}
    <main id="main" tabindex="-1">${VIEW[state.view]()}</main>
    ${keyDialog()}
  `;
}

const VIEW = {
  draw: () => html`
    <div class="columns">
      ${requestForm({ submit: () => start({ view: "draw" }), verb: "Draw" })}
      ${stage(state.job?.view === "draw" ? state.job : null, "Your picture appears here.")}
    </div>
  `,
  edit: editView,
  history: historyView,
  fleet: fleetView,
};

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function keyDialog() {
  return html`
    <dialog aria-labelledby="key-title" @cancel=${closeKey}>
      <form @submit=${useKey}>
        <h2 id="key-title">API key</h2>
        <p class="hint">The key stays in this page's memory. It is gone when you close the page or load it again.</p>
        <div class="field wide">
          <label for="key">Key</label>
          <input id="key" name="key" type="password" autocomplete="off" spellcheck="false" placeholder="btg_…" />
          ${state.keyFailure ? html`<p class="problem" role="alert">${state.keyFailure}</p>` : nothing}
        </div>
        <div class="actions">
          <button type="button" @click=${closeKey}>Close</button>
          <button type="submit" class="primary">Use this key</button>
        </div>
      </form>
    </dialog>
  `;
}

// The state says whether the dialog is open; the browser would close it a moment before it says so.
function closeKey(event) {
  event.preventDefault();
  update({ keyShown: false });
}

async function useKey(event) {
  event.preventDefault();
  const form = event.target;
  const key = new FormData(form).get("key");
  setKey(key);
  forgetHistory();
  leave();
  update({
    hasKey: Boolean(key.trim()),
    failure: "",
    keyFailure: "",
    models: [],
    loras: [],
    controlnets: [],
    fleet: null,
  });
  if (await loadLists()) {
    form.reset();
    update({ keyShown: false });
    show(state.view);
  }
}

function draw() {
  render(page(), root);
  afterDraw();
  const dialog = root.querySelector("dialog");
  if (state.keyShown && !dialog.open) dialog.showModal();
  if (!state.keyShown && dialog.open) dialog.close();
}

// A picture that is dropped on the page is edited.
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  const [file] = event.dataTransfer?.files ?? [];
  if (!file) return;
  show("edit");
  choose(file);
});

whenShown("history", () => loadHistory());
whenShown("fleet", watchFleet);
root.replaceChildren();
onChange(draw);
startRouter();
watchConnection();
