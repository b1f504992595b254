// What the form holds, and how it becomes the body of a request.

import { base64 } from "./api.js";
import { keptFor, keptOfControlNet, keptOfLora } from "./kept.js";
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
  loras: [], // {name, scale, kept}
  controlnets: [], // {name, scale, start, end, mode, image: {blob, url, name}, kept}
  kept: {}, // fields of a request that the form does not show, from the job that filled the form
  missing: [], // what the form cannot take over from that job, in words
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
const given = (fields) => Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined));

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
  const kind = { isEdit: Boolean(edit), format: draft.output_format };
  const { size, output_compression, ...kept } = keptFor(draft.kept, kind);
  const body = {
    prompt: draft.prompt,
    model: text(draft.model),
    n: number(draft.n),
    output_format: draft.output_format,
    output_compression,
    size,
    bottega: {
      ...kept,
      ...given({
        negative_prompt: text(draft.negative_prompt),
        seed: number(draft.seed),
        num_inference_steps: number(draft.num_inference_steps),
        guidance_scale: number(draft.guidance_scale),
        sampler: text(draft.sampler),
        fidelity: text(draft.fidelity),
        priority: draft.priority,
        loras: draft.loras.length ? draft.loras.map(lora) : undefined,
        controlnets: draft.controlnets.length ? await Promise.all(draft.controlnets.map(controlNet)) : undefined,
      }),
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

function lora({ name, scale, kept }) {
  return { ...kept, name, scale: number(scale) };
}

async function controlNet(net) {
  return {
    ...net.kept,
    name: net.name,
    image: await base64(net.image.blob),
    controlnet_conditioning_scale: number(net.scale),
    control_guidance_start: number(net.start),
    control_guidance_end: number(net.end),
    control_mode: text(net.mode),
  };
}

// Fill the form with the parameters of a job, so that it draws the same picture again.
export function fillFrom(parameters, { kept, missing, priority = "normal" } = {}) {
  const shown = (value) => String(value ?? "");
  const positive = (value) => String(value || ""); // 0 says that a parameter was not given
  setDraft({
    ...structuredClone(EMPTY),
    prompt: parameters.prompt || parameters.prompts?.[0] || "",
    negative_prompt: shown(parameters.negative_prompt),
    model: shown(parameters.model),
    n: String(parameters.prompts?.length ? 1 : (parameters.num_images ?? 1)),
    width: positive(parameters.width),
    height: positive(parameters.height),
    seed: shown(parameters.seed),
    num_inference_steps: positive(parameters.num_inference_steps),
    guidance_scale: shown(parameters.guidance_scale),
    sampler: shown(parameters.sampler),
    fidelity: shown(parameters.fidelity),
    strength: shown(parameters.strength),
    output_format: parameters.format ?? "png",
    priority,
    loras: (parameters.lora ?? []).map((item) => ({
      name: item.name,
      scale: shown(item.scale ?? 1),
      kept: keptOfLora(item),
    })),
    controlnets: (parameters.controlnets ?? []).map((net) => ({
      name: net.name,
      scale: shown(net.controlnet_conditioning_scale),
      start: shown(net.control_guidance_start ?? 0),
      end: shown(net.control_guidance_end ?? 1),
      mode: shown(net.control_mode),
      image: null,
      kept: keptOfControlNet(net),
    })),
    ...given({ kept, missing }),
  });
}
