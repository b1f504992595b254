// Fields of a request that the form does not show. A job that fills the form can have them: they are sent again, unless
// somebody drops them.

import { html, nothing } from "./vendor/lit-html.js";
import { say } from "./store.js";

// Parameters of a job that the form shows, or that a request takes in another form.
const ELSEWHERE = new Set([
  "prompt",
  "prompts",
  "negative_prompt",
  "num_images",
  "model",
  "num_inference_steps",
  "guidance_scale",
  "width",
  "height",
  "seed",
  "sampler",
  "strength",
  "mask_alpha",
  "lora",
  "controlnets",
  "format",
  "quality",
  "fidelity",
  "recording",
]);
const OF_EDITS = ["size", "padding_mask_crop", "keep_unmasked", "mask_feather"];
const NOT_OF_EDITS = ["keep_for_editing", "cache_entry"];
// Parameters of how a picture was drawn that an edit of the picture does not share.
const OF_THE_DRAWING = [
  "guidance_rescale",
  "true_cfg_scale",
  "cfg_normalization",
  "cfg_truncation",
  "timesteps",
  "sigmas",
];
const TECHNIQUES = [
  "bounded_lora_loading",
  "stale_residuals",
  "latent_parallelism",
  "shared_turns",
  "step_caching",
  "masked_blocks",
  "approximate_cache",
  "identical_results",
];

const chosen = (fields, isChosen) =>
  Object.fromEntries(Object.entries(fields).filter(([name, value]) => isChosen(name, value)));
export const without = (fields, names) => chosen(fields, (name) => !names.includes(name));
const present = (fields) => chosen(fields, (_, value) => value !== null && value !== undefined);
const isOn = (value) => value || undefined;

// What a request keeps of a job's parameters. provenance: null if the job has no pictures.
export function keptOf(parameters, provenance) {
  const kept = chosen(present(parameters), (name, value) => !ELSEWHERE.has(name) && value.length !== 0);
  if (!parameters.keep_for_editing) delete kept.keep_for_editing;
  if (!parameters.guidance_rescale) delete kept.guidance_rescale;
  if (!(parameters.true_cfg_scale > 1)) delete kept.true_cfg_scale;
  if (!parameters.cfg_normalization) delete kept.cfg_normalization;
  if (!(parameters.cfg_truncation < 1)) delete kept.cfg_truncation;
  if (parameters.prompt_syntax === "plain") delete kept.prompt_syntax;
  // The form's field cannot tell an empty text from none, which some models draw differently.
  if (parameters.negative_prompt === "") kept.negative_prompt = "";
  const isSized = parameters.padding_mask_crop !== null || provenance?.source?.resized;
  if (drawsAnEdit(parameters) && isSized) kept.size = `${parameters.width}x${parameters.height}`;
  if (parameters.format !== "png" && parameters.quality) kept.output_compression = parameters.quality;
  return kept;
}

export const drawsAnEdit = (parameters) =>
  parameters.mask_feather !== null || parameters.strength !== null;

// What an edit of a picture keeps of the parameters with which the picture was drawn.
export const keptForEditOf = (parameters) =>
  without(keptOf(parameters, null), [...OF_THE_DRAWING, ...TECHNIQUES, ...OF_EDITS, ...NOT_OF_EDITS]);

export function keptOfLora({ from_step, digest, max_step, measure_similarity }) {
  // A LoRA that goes in at a given step needs no latest step.
  const latest = from_step === null ? max_step : null;
  return present({ from_step, digest, max_step: latest, measure_similarity: isOn(measure_similarity) });
}

export function keptOfControlNet({ guess_mode, measure_similarity }) {
  return present({ guess_mode: isOn(guess_mode), measure_similarity: isOn(measure_similarity) });
}

// The kept fields that a request of this kind and file format can have.
export function keptFor(kept, { isEdit, format }) {
  const lossless = format === "png" ? ["output_compression"] : [];
  return without(kept, [...(isEdit ? NOT_OF_EDITS : OF_EDITS), ...lossless]);
}

// The kept fields, each with a button that drops it. drop: called with the names of the fields to drop.
export function keptFields(kept, drop) {
  const names = Object.keys(kept);
  if (!names.length) return nothing;
  const dropAll = html`<button type="button" class="quiet" @click=${() => drop(names)}>Drop all</button>`;
  return html`
    <div class="kept">
      <span class="hint">Also:</span>
      ${names.map((name) => keptField(name, kept[name], () => drop([name])))}
      ${names.length > 1 ? dropAll : nothing}
    </div>
  `;
}

function keptField(name, value, drop) {
  const label = `${LABELS[name] ?? name.replaceAll("_", " ")}: ${name === "digest" ? value.slice(0, 12) : words(value)}`;
  const dropped = () => {
    drop();
    say(`Dropped ${label}`);
  };
  return html`
    <button type="button" class="chip" aria-label="Drop ${label}" title="Drop ${label}" @click=${dropped}>
      <span>${label}</span> ✕
    </button>
  `;
}

const LABELS = { output_compression: "file quality", digest: "weights" };

function words(value) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  return value === "" ? "empty" : Array.isArray(value) ? value.join(", ") : String(value);
}
