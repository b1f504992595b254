// What the form holds, and how it becomes the body of a request.

import { base64 } from "./api.js";
import { state, update } from "./store.js";

const EMPTY = {
  prompt: "",
  negative_prompt: "",
  model: "",
  n: "1",
  width: "",
  height: "",
  seed: "",
  num_inference_steps: "",
  guidance_scale: "",
  sampler: "",
  fidelity: "",
  strength: "",
  output_format: "png",
  priority: "normal",
  loras: [], // {name, scale}
  controlnets: [], // {name, scale, start, end, image: {blob, url, name}}
};

export const draft = structuredClone(EMPTY);

export function setDraft(changes) {
  Object.assign(draft, changes);
  update();
}

// The model that the request will use.
export function chosenModel() {
  return state.models.find((model) => model.id === draft.model) ?? state.models[0];
}

export function adaptersOf(list) {
  const model = chosenModel();
  return list.filter((adapter) => !model || !adapter.models.length || adapter.models.includes(model.id));
}

const number = (text) => (String(text).trim() === "" ? undefined : Number(text));
const text = (value) => (value === "" ? undefined : value);

// What is wrong with the form itself, by field of the API.
export function problems(isEdit) {
  const found = {};
  if (!draft.prompt.trim()) found.prompt = "Say what to draw.";
  if (!draft.width !== !draft.height) found.size = "Give both width and height, or neither.";
  draft.controlnets.forEach((net, index) => {
    if (!net.image) found[`bottega.controlnets[${index}].image`] = "Choose a control image.";
  });
  if (isEdit && !state.source) found.image = "Choose the picture to edit.";
  return found;
}

// The body of POST /v1/jobs.
export async function bodyOf(edit) {
  const body = {
    prompt: draft.prompt,
    model: text(draft.model),
    n: number(draft.n),
    output_format: draft.output_format,
    bottega: {
      negative_prompt: text(draft.negative_prompt),
      seed: number(draft.seed),
      num_inference_steps: number(draft.num_inference_steps),
      guidance_scale: number(draft.guidance_scale),
      sampler: text(draft.sampler),
      fidelity: text(draft.fidelity),
      priority: draft.priority,
      loras: draft.loras.length
        ? draft.loras.map((lora) => ({ name: lora.name, scale: number(lora.scale) }))
        : undefined,
      controlnets: draft.controlnets.length ? await Promise.all(draft.controlnets.map(controlNet)) : undefined,
    },
  };
  if (!edit && draft.width) body.size = `${number(draft.width)}x${number(draft.height)}`;
  if (edit) {
    body.image = await base64(edit.image);
    if (edit.mask) body.mask = await base64(edit.mask);
    body.bottega.strength = number(draft.strength);
  }
  return body;
}

async function controlNet(net) {
  return {
    name: net.name,
    image: await base64(net.image.blob),
    controlnet_conditioning_scale: number(net.scale),
    control_guidance_start: number(net.start),
    control_guidance_end: number(net.end),
  };
}

// Fill the form with the parameters of a job, so that it draws the same picture again.
export function fillFrom(parameters, { prompt = parameters.prompt || parameters.prompts?.[0] || "" } = {}) {
  const shown = (value) => (value === null || value === undefined || value === 0 ? "" : String(value));
  const scale = (value, plain) => String(value ?? plain);
  setDraft({
    ...structuredClone(EMPTY),
    prompt,
    negative_prompt: parameters.negative_prompt ?? "",
    model: parameters.model ?? "",
    n: String(parameters.num_images ?? 1),
    width: shown(parameters.width),
    height: shown(parameters.height),
    seed: String(parameters.seed ?? ""),
    num_inference_steps: shown(parameters.num_inference_steps),
    guidance_scale: String(parameters.guidance_scale ?? ""),
    sampler: parameters.sampler ?? "",
    fidelity: parameters.fidelity ?? "",
    strength: shown(parameters.strength),
    output_format: parameters.format ?? "png",
    loras: (parameters.lora ?? []).map((lora) => ({ name: lora.name, scale: scale(lora.scale, 1) })),
    controlnets: (parameters.controlnets ?? []).map((net) => ({
      name: net.name,
      scale: net.controlnet_conditioning_scale === null ? "" : scale(net.controlnet_conditioning_scale, ""),
      start: scale(net.control_guidance_start, 0),
      end: scale(net.control_guidance_end, 1),
      image: null,
    })),
  });
}
