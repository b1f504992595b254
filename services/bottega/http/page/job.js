// One job from its start to its pictures. A job outlives a broken connection: the page attaches again.

import { ApiError, call, getBlob, getJson, newId, openEvents } from "./api.js";
import { bodyOf, problems, setDraft } from "./draft.js";
import { reveal, say, state, update } from "./store.js";
import { watchConnection } from "./connection.js";

const FIRST_WAIT_MS = 300;
const LONGEST_WAIT_MS = 4_000;
const RUNNING = ["sending", "queued", "running"];

export const isRunning = (job) => Boolean(job) && RUNNING.includes(job.status);

// Draw what the form says. `edit` has the source and the mask, as blobs.
export async function start({ edit = null, view = state.view } = {}) {
  const found = problems(view === "edit");
  if (Object.keys(found).length) {
    update({ errors: found, failure: "" });
    focusFirstError();
    return;
  }
  const progress = { done: 0, total: 0, place: 0, estimate: null, previews: [], pictures: [] };
  const job = { view, status: "sending", ...progress, left: new AbortController() };
  forget(state.job);
  update({ job, errors: {}, failure: "" });
  try {
    const body = await bodyOf(edit);
    const made = await getJson("/v1/jobs", { method: "POST", body, headers: { "idempotency-key": newId() } });
    change(job, { id: made.id, status: made.status, total: made.steps_total, parameters: made.parameters });
    if (job.cancelling) await cancelNow(job);
    if (job.left.signal.aborted) return;
    setDraft({ missing: [] });
    if (!job.cancelling) say("The picture is being drawn.");
    reveal(".stage");
    await follow(job);
  } catch (error) {
    refused(job, error);
  }
}

function refused(job, error) {
  if (job.left.signal.aborted) return;
  if (!(error instanceof ApiError)) throw error;
  change(job, { status: "refused" });
  if (error.status === 401) update({ keyShown: true });
  if (error.status === 0 || error.status === 503) watchConnection();
  update({ job: null, failure: error.message, errors: error.fields });
  focusFirstError();
}

// Apply the events of a job until it has ended, or until the page leaves it for another job or another key.
async function follow(job) {
  const { signal } = job.left;
  let lastId = "";
  let waitMs = FIRST_WAIT_MS;
  while (isRunning(job) && !signal.aborted) {
    try {
      const events = await openEvents(`/v1/jobs/${job.id}/events?preview=true`, { lastId, signal });
      change(job, { interrupted: false }); // a long step may follow before the next event
      for await (const event of events) {
        lastId = event.id || lastId;
        waitMs = FIRST_WAIT_MS;
        await apply(job, event);
      }
      if (isRunning(job)) await settle(job);
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ApiError) || !error.passes) throw error;
      if (!job.interrupted) watchConnection();
      change(job, { interrupted: true });
    }
    if (isRunning(job)) {
      await new Promise((resume) => setTimeout(resume, waitMs));
      waitMs = Math.min(2 * waitMs, LONGEST_WAIT_MS);
    }
  }
}

async function apply(job, { type, data }) {
  if (type === "job.queued") change(job, { status: "queued", place: data.place, estimate: data.estimate_s });
  if (type === "job.progress") {
    const previews = [...job.previews];
    for (const preview of data.previews) previews[preview.index] = `data:image/jpeg;base64,${preview.b64_json}`;
    change(job, { status: "running", done: data.steps_done, total: data.steps_total, previews });
  }
  if (type === "job.completed") await complete(job, data.images, data.provenance);
  if (type === "job.failed") fail(job, data.error);
}

// A stream can end without the last event, for example when the service stops: ask how the job stands.
async function settle(job) {
  const now = await getJson(`/v1/jobs/${job.id}`, { signal: job.left.signal });
  if (now.status === "completed") await complete(job, now.images, now.provenance);
  else if (now.error) fail(job, now.error);
}

async function complete(job, images, provenance) {
  const seed = provenance?.parameters?.seed ?? 0;
  const { signal } = job.left;
  const blobs = await Promise.all(images.map((image) => getBlob(image.url, { signal })));
  signal.throwIfAborted();
  const pictures = images.map((image, at) => {
    const url = URL.createObjectURL(blobs[at]);
    return { blob: blobs[at], url, seed: image.seed ?? seed + image.index, index: image.index };
  });
  change(job, { status: "completed", pictures, provenance, done: job.total });
  say(pictures.length === 1 ? "The picture is ready." : `${pictures.length} pictures are ready.`);
}

function fail(job, error) {
  const cancelled = error.code === "job_cancelled";
  change(job, { status: cancelled ? "cancelled" : "failed", error: cancelled ? "" : error.message });
  say(cancelled ? "Cancelled." : `The picture could not be drawn: ${error.message}`);
}

// Cancel a job. One that is still being sent is cancelled as soon as it has an ID.
export async function cancel(job) {
  if (job.cancelling) return;
  change(job, { cancelling: true });
  if (job.id) await cancelNow(job);
}

async function cancelNow(job) {
  try {
    await call(`/v1/jobs/${job.id}/cancel`, { method: "POST" });
  } catch (error) {
    change(job, { cancelling: false });
    if (job === state.job) update({ failure: error.message });
  }
}

// Stop watching the job, which another key may not see.
export function leave() {
  forget(state.job);
  update({ job: null });
}

// Stop watching a job, which goes on, and free its pictures.
function forget(job) {
  job?.left.abort();
  for (const picture of job?.pictures ?? []) {
    if (picture.url !== state.source?.url) URL.revokeObjectURL(picture.url);
  }
}

function change(job, changes) {
  Object.assign(job, changes);
  update();
}

function focusFirstError() {
  setTimeout(() => {
    const field = document.querySelector("[aria-invalid=true]");
    field?.closest("details")?.setAttribute("open", "");
    (field ?? document.querySelector(".failure"))?.focus();
  });
}
