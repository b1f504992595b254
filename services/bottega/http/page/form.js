// The form that Draw and Edit share: the prompt, and all parameters with their defaults.

import { html, nothing } from "./vendor/lit-html.js";
import { controlNetFields, loraFields } from "./adapters.js";
import { chosenModel, draft, setDraft } from "./draft.js";
import { choiceField, numberField, otherProblems, textField } from "./fields.js";
import { cancel, isRunning } from "./job.js";
import { keptFields, keptFor, without } from "./kept.js";
import { state } from "./store.js";

const FIDELITIES = [
  ["", "Default"],
  ["exact", "Exact"],
  ["balanced", "Balanced"],
  ["fast", "Fast"],
];
const FORMATS = [
  ["png", "PNG"],
  ["jpeg", "JPEG"],
  ["webp", "WebP"],
];
const PRIORITIES = [
  ["normal", "Normal"],
  ["high", "High"],
  ["low", "Low"],
];

// submit: called when the form is sent. before: what comes above the prompt.
export function requestForm({ submit, verb, isEdit = false, before = nothing }) {
  const running = isRunning(state.job) && state.job.view === (isEdit ? "edit" : "draw");
  return html`
    <form
      class="panel form"
      novalidate
      aria-label=${isEdit ? "What to change" : "What to draw"}
      @submit=${(event) => {
        event.preventDefault();
        if (!running) submit();
      }}
    >
      ${before}
      ${textField("prompt", "Prompt", "prompt", {
        rows: 3,
        placeholder: isEdit ? "The whole picture, as it shall be" : "a big red star on the left on a blue background",
      })}
      ${textField("bottega.negative_prompt", "Negative prompt", "negative_prompt", { rows: 1, placeholder: "What to avoid" })}
      <div class="grid">
        ${state.models.length > 1 ? modelField() : nothing} ${seedField()}
        ${isEdit ? strengthField() : nothing} ${numberField("n", "Pictures", "n", { min: 1, max: 8 })}
      </div>
      ${loraFields()} ${controlNetFields()} ${moreFields(isEdit)} ${ofTheJob(isEdit)} ${failures()}
      <div class="actions">${button(running, verb)}</div>
    </form>
  `;
}

// One button, so that it keeps the focus when it changes.
function button(running, verb) {
  const { job } = state;
  return html`
    <button
      type=${running ? "button" : "submit"}
      class="primary"
      aria-disabled=${running && job.cancelling ? "true" : "false"}
      @click=${running ? () => cancel(job) : nothing}
    >
      ${running ? (job.cancelling ? "Cancelling …" : "Cancel") : verb}
    </button>
  `;
}

function modelField() {
  const options = state.models.map((model) => [model.id, model.id]);
  return choiceField("model", "Model", "model", [["", `${options[0][1]} (default)`], ...options]);
}

function seedField() {
  return html`
    <div class="with-button">
      ${numberField("bottega.seed", "Seed", "seed", { min: 0, placeholder: "random" })}
      <button
        type="button"
        class="quiet"
        aria-label="Use a random seed"
        title="Use a random seed"
        ?disabled=${draft.seed === ""}
        @click=${() => setDraft({ seed: "" })}
      >
        ⟲
      </button>
    </div>
  `;
}

function strengthField() {
  const model = chosenModel()?.bottega ?? {};
  const standard = state.shapes.length ? model.default_edit_strength : model.default_strength;
  return numberField("bottega.strength", "Strength", "strength", {
    min: 0,
    max: 1,
    step: "0.05",
    placeholder: standard ? String(round(standard)) : "",
    hint: "1 redraws all",
  });
}

function moreFields(isEdit) {
  const model = chosenModel()?.bottega ?? {};
  const samplers = (model.samplers ?? []).map((name) => [name, name.replaceAll("_", " ")]);
  const standard = model.default_sampler ? `Default (${model.default_sampler.replaceAll("_", " ")})` : "Default";
  return html`
    <details class="more">
      <summary>Steps, guidance, size and more</summary>
      <div class="grid">
        ${numberField("bottega.num_inference_steps", "Steps", "num_inference_steps", {
          min: 1,
          placeholder: shown(model.default_steps),
        })}
        ${numberField("bottega.guidance_scale", "Guidance", "guidance_scale", {
          min: 0,
          step: "0.5",
          placeholder: shown(model.default_guidance_scale),
        })}
        ${choiceField("bottega.sampler", "Sampler", "sampler", [["", standard], ...samplers])}
        ${choiceField("bottega.fidelity", "Fidelity", "fidelity", FIDELITIES)} ${isEdit ? nothing : sizeFields(model)}
        ${choiceField("output_format", "File format", "output_format", FORMATS)}
        ${choiceField("bottega.priority", "Priority", "priority", PRIORITIES)}
      </div>
    </details>
  `;
}

function sizeFields(model) {
  const step = shown(model.size_multiple) || "1";
  const max = model.max_side || undefined;
  return html`
    ${numberField("size", "Width", "width", { min: step, max, step, placeholder: shown(model.default_width) })}
    ${numberField("height", "Height", "height", { min: step, max, step, placeholder: shown(model.default_height) })}
  `;
}

// What the form has of the job that filled it, beside its fields, and what it has not.
function ofTheJob(isEdit) {
  const drop = (names) => setDraft({ kept: without(draft.kept, names) });
  return html`
    ${keptFields(keptFor(draft.kept, { isEdit, format: draft.output_format }), drop)}
    ${draft.missing.length ? html`<p class="hint missing">Not taken over: ${draft.missing.join("; ")}.</p>` : nothing}
  `;
}

function failures() {
  const others = otherProblems();
  if (!state.failure && !others.length) return nothing;
  return html`
    <div class="failure" role="alert" tabindex="-1">
      ${state.failure && !Object.keys(state.errors).length ? html`<p>${state.failure}</p>` : nothing}
      ${others.map(([name, text]) => html`<p><b>${plain(name)}</b> ${text}</p>`)}
    </div>
  `;
}

const plain = (name) => name.replace("bottega.", "").replaceAll("_", " ");
const shown = (value) => (value === null || value === undefined ? "" : String(round(value)));
const round = (value) => Math.round(value * 1000) / 1000;
