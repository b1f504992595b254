// The jobs of this key, newest first, and one of them in detail.

import { html, nothing } from "./vendor/lit-html.js";
import { ApiError, call, getBlob, getJson } from "./api.js";
import { editFromHistory } from "./edit.js";
import { fillFrom } from "./draft.js";
import { drawsAnEdit, keptOf } from "./kept.js";
import { saveAs } from "./pictures.js";
import { show } from "./router.js";
import { fileName, seconds } from "./stage.js";
import { reveal, say, state, update } from "./store.js";
import { timeline } from "./timeline.js";

const PAGE_SIZE = 12;
const ENDED = ["completed", "failed", "cancelled"];

let visit = {}; // another one for each key, so that no answer to an earlier key is shown

const thumbnails = new Map(); // URLs of blobs by path, as <img> cannot send a key

export async function loadHistory({ more = false } = {}) {
  const token = more ? state.history.next : "";
  const asked = visit;
  try {
    const page = await getJson(`/v1/jobs?page_size=${PAGE_SIZE}&page_token=${encodeURIComponent(token)}`);
    if (asked !== visit) return;
    const jobs = more ? [...state.history.jobs, ...page.data] : page.data;
    update({ history: { jobs, next: page.next_page_token, loaded: true, failure: "" } });
    await Promise.all(page.data.filter((job) => job.images.length).map((job) => thumbnail(job.images[0].url)));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (asked !== visit) return;
    update({ history: { ...state.history, loaded: true, failure: error.message }, keyShown: error.status === 401 });
  }
}

async function thumbnail(path) {
  if (thumbnails.has(path)) return;
  thumbnails.set(path, "");
  const asked = visit;
  try {
    const blob = await getBlob(path);
    if (asked === visit) thumbnails.set(path, URL.createObjectURL(blob));
  } catch {
    thumbnails.delete(path); // a picture can be gone; its job is listed all the same
  }
  update();
}

// Forget what another key may not see.
export function forgetHistory() {
  visit = {};
  for (const url of thumbnails.values()) URL.revokeObjectURL(url);
  thumbnails.clear();
  freePictures();
  update({ history: { jobs: [], next: "", loaded: false, failure: "" }, selected: null });
}

export function historyView() {
  const { jobs, next, loaded, failure } = state.history;
  return html`
    <div class="columns history">
      <section class="panel" aria-label="Jobs">
        <div class="row heading">
          <h2>Jobs</h2>
          <button type="button" class="quiet" @click=${() => loadHistory()}>Refresh</button>
        </div>
        ${failure ? html`<p class="failure" role="alert">${failure}</p>` : nothing}
        ${loaded && !jobs.length && !failure ? html`<p class="hint">Nothing was drawn yet.</p>` : nothing}
        <ul class="jobs">
          ${jobs.map((job) => html`<li>${card(job)}</li>`)}
        </ul>
        ${next ? html`<button type="button" @click=${() => loadHistory({ more: true })}>Older jobs</button>` : nothing}
      </section>
      <section class="panel" aria-label="Job" data-details>
        ${state.selected ? details(state.selected) : html`<div class="empty">Choose a job to see how it was drawn.</div>`}
      </section>
    </div>
  `;
}

function card(job) {
  const url = job.images.length ? thumbnails.get(job.images[0].url) : "";
  return html`
    <button type="button" class="card" aria-pressed=${state.selected?.job.id === job.id} @click=${() => select(job)}>
      ${url ? html`<img src=${url} alt="" />` : html`<span class="no-picture" aria-hidden="true"></span>`}
      <span class="about">
        <span class="title">${job.parameters.prompt || job.parameters.prompts[0]}</span>
        <span class="facts"><span class="state ${job.status}">${job.status}</span> ${when(job.created_at)}</span>
      </span>
    </button>
  `;
}

const when = (time) => new Date(time).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

async function select(job) {
  freePictures();
  const selected = { job, spans: null, failure: "", pictures: [] };
  update({ selected });
  try {
    Object.assign(selected, { job: await getJson(`/v1/jobs/${job.id}`) });
    const blobs = await Promise.all(selected.job.images.map((image) => getBlob(image.url)));
    if (state.selected !== selected) return; // another job was chosen, or another key
    selected.pictures = selected.job.images.map((image, at) => {
      return { ...image, blob: blobs[at], address: URL.createObjectURL(blobs[at]) };
    });
    if (ENDED.includes(selected.job.status)) selected.spans = await spansOf(job);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    selected.failure = error.message;
  }
  update();
  setTimeout(() => reveal("[data-details]"));
}

function freePictures() {
  for (const picture of state.selected?.pictures ?? []) URL.revokeObjectURL(picture.address);
}

// The gateway keeps only the traces of the jobs that ended last.
async function spansOf(job) {
  try {
    return (await getJson(`/v1/jobs/${job.id}/trace`)).spans;
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

function details({ job, spans, failure, pictures }) {
  const ended = ENDED.includes(job.status);
  return html`
    <div class="row heading">
      <h2>${job.parameters.prompt || job.parameters.prompts[0]}</h2>
    </div>
    <div class="pictures count-${pictures.length}">
      ${pictures.map(
        (picture) => html`
          <figure>
            <img src=${picture.address} alt="Picture ${picture.index + 1} of this job" />
            <figcaption>
              <span>Seed ${job.parameters.seed + picture.index}</span>
              <span class="buttons">
                <button type="button" class="quiet" @click=${() => editFromHistory(job, picture)}>Edit</button>
                <button
                  type="button"
                  class="quiet"
                  @click=${() => saveAs({ ...picture, url: picture.address }, fileName(job, picture))}
                >
                  Save
                </button>
              </span>
            </figcaption>
          </figure>
        `,
      )}
    </div>
    ${job.error ? html`<p class="problem">${job.error.message}</p>` : nothing}
    <div class="row">
      <button type="button" class="primary" @click=${() => again(job)}>Again with these</button>
      ${
        ended
          ? html`<button type="button" @click=${() => remove(job)}>Delete</button>`
          : html`<button type="button" @click=${() => cancelJob(job)}>Cancel</button>`
      }
    </div>
    ${failure ? html`<p class="failure" role="alert">${failure}</p>` : nothing} ${spans ? timeline(spans) : nothing}
    ${facts(job)}
  `;
}

// Whether a parameter says nothing: false does only for those that are true or absent.
const isPlain = (name, value) =>
  value === null || value?.length === 0 || (value === false && ["mask_alpha", "keep_for_editing"].includes(name));

function facts(job) {
  const parameters = job.provenance?.parameters ?? job.parameters;
  const rows = Object.entries(parameters).filter(([name, value]) => !isPlain(name, value) && name !== "prompt");
  const took =
    job.ended_at && job.started_at ? seconds((new Date(job.ended_at) - new Date(job.started_at)) / 1000) : "";
  return html`
    <h3>Parameters</h3>
    <dl class="parameters">
      <div>
        <dt>job</dt>
        <dd>${job.id}</dd>
      </div>
      ${
        took
          ? html`<div>
              <dt>drawn in</dt>
              <dd>${took}</dd>
            </div>`
          : nothing
      }
      ${rows.map(
        ([name, value]) =>
          html`<div>
            <dt>${name.replaceAll("_", " ")}</dt>
            <dd>${shown(value)}</dd>
          </div>`,
      )}
    </dl>
  `;
}

function shown(value) {
  if (Array.isArray(value)) return value.map(shown).join(", ");
  if (typeof value === "object") return value.name ?? JSON.stringify(value);
  return typeof value === "number" ? String(Math.round(value * 1000) / 1000) : String(value);
}

function again(job) {
  const parameters = job.provenance?.parameters ?? job.parameters;
  const missing = missingOf(job, parameters);
  fillFrom(parameters, { kept: keptOf(parameters, job.provenance), missing, priority: job.priority });
  const exception = missing.length ? `, but not: ${missing.join("; ")}` : "";
  say(`The form has the job's parameters${exception}.`);
  show(drawsAnEdit(parameters) ? "edit" : "draw");
}

// What a request of the form cannot have of a job, in words.
function missingOf(job, parameters) {
  const others = parameters.prompts.length - 1;
  const source = state.source ? "so check those that are here" : "which you choose again";
  return [
    ...(drawsAnEdit(parameters) ? [`the picture to edit and its mask, ${source}`] : []),
    ...(parameters.controlnets.length ? ["the control images, which you choose again"] : []),
    ...(others > 0 ? [`the other ${others === 1 ? "prompt" : `${others} prompts`}, as the form draws one`] : []),
    ...(parameters.recording ? ["what the edit used of an earlier one, so the picture may differ a little"] : []),
    ...(job.webhook ? ["the webhook"] : []),
  ];
}

async function cancelJob(job) {
  await act(job, () => call(`/v1/jobs/${job.id}/cancel`, { method: "POST" }));
}

async function remove(job) {
  await act(job, () => call(`/v1/jobs/${job.id}`, { method: "DELETE" }));
}

async function act(job, request) {
  try {
    await request();
    freePictures();
    update({ selected: null });
    await loadHistory();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    Object.assign(state.selected, { failure: error.message });
    update();
  }
}
