// The side of a view that shows a job: its progress, its previews, its pictures.

import { html, nothing } from "./vendor/lit-html.js";
import { editPicture } from "./edit.js";
import { setDraft } from "./draft.js";
import { isRunning } from "./job.js";
import { saveAs } from "./pictures.js";

export function stage(job, empty) {
  return html`
    <section class="panel stage" aria-label="Result" aria-busy=${isRunning(job) ? "true" : "false"}>
      ${job ? content(job) : html`<div class="empty">${empty}</div>`}
    </section>
  `;
}

function content(job) {
  if (job.status === "completed") return finished(job);
  if (isRunning(job)) return running(job);
  const text = job.status === "cancelled" ? "Cancelled." : `The picture could not be drawn: ${job.error ?? ""}`;
  return html`<div class="empty"><p class=${job.status === "failed" ? "problem" : ""}>${text}</p></div>`;
}

function running(job) {
  const previews = job.previews.filter(Boolean);
  return html`
    <div class="pictures count-${Math.max(1, previews.length)}">
      ${
        previews.length
          ? previews.map((url, index) => html`<img class="preview" src=${url} alt="Preview of picture ${index + 1}" />`)
          : html`<div class="waiting" aria-hidden="true"></div>`
      }
    </div>
    <div class="progress">
      <label for="progress">${progressText(job)}</label>
      ${
        job.status === "running" && job.total
          ? html`<progress id="progress" max=${job.total} .value=${job.done}></progress>`
          : html`<progress id="progress"></progress>`
      }
    </div>
  `;
}

function progressText(job) {
  if (job.interrupted) return "The connection is interrupted. The job goes on; this page attaches again.";
  if (job.status === "sending") return "Sending …";
  if (job.status === "queued") return queueText(job);
  return `Step ${job.done} of ${job.total}`;
}

function queueText(job) {
  const place = job.place ? `${job.place} ${job.place === 1 ? "job is" : "jobs are"} ahead` : "Next in the queue";
  return job.estimate ? `${place}, about ${seconds(job.estimate)}` : place;
}

function finished(job) {
  return html`
    <div class="pictures count-${job.pictures.length}">
      ${job.pictures.map(
        (picture) => html`
          <figure>
            <img src=${picture.url} alt="Picture of: ${job.parameters?.prompt ?? ""}" />
            <figcaption>
              <span>Seed ${picture.seed}</span>
              <span class="buttons">
                <button type="button" class="quiet" @click=${() => setDraft({ seed: String(picture.seed) })}>
                  Keep seed
                </button>
                <button type="button" class="quiet" @click=${() => editPicture(picture, job)}>Edit</button>
                <button type="button" class="quiet" @click=${() => saveAs(picture, fileName(job, picture))}>
                  Save
                </button>
              </span>
            </figcaption>
          </figure>
        `,
      )}
    </div>
    ${notes(job.provenance)}
  `;
}

function notes(provenance) {
  if (!provenance) return nothing;
  const exact = "Exact: stock Diffusers draws the same picture with these parameters.";
  const approximate = "Approximate: stock Diffusers may draw it a little differently. The history says what was used.";
  return html`
    <p class="hint">${provenance.exact ? exact : approximate}</p>
    ${provenance.truncations.map((cut) => html`<p class="problem">The prompt is too long; ignored: ${cut.text}</p>`)}
  `;
}

export function fileName(job, picture) {
  return `${job.id}-${picture.index}.${picture.blob.type.split("/")[1]}`;
}

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 90 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}
