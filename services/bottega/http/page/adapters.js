// The parts of the form for LoRAs, which change the style, and for ControlNets, which follow a control image.

import { html, nothing } from "./vendor/lit-html.js";
import { adaptersOf, draft, setDraft } from "./draft.js";
import { field, numberInput } from "./fields.js";
import { keptFields, without } from "./kept.js";
import { NotAPicture, readPicture } from "./pictures.js";
import { say, state, update } from "./store.js";

// What the control image of a union shows, by number.
const MODES = ["openpose", "depth", "hed", "canny", "normal", "segment", "tile", "repaint"];

export function loraFields() {
  const known = adaptersOf(state.loras);
  if (!known.length && !draft.loras.length) return nothing;
  return html`
    <fieldset>
      <legend>LoRAs</legend>
      ${draft.loras.map((lora, index) => loraRow(lora, index))}
      ${adder("lora", "Add a LoRA", known, draft.loras, (name) => {
        setDraft({ loras: [...draft.loras, { name, scale: "1", kept: {} }] });
      })}
    </fieldset>
  `;
}

function loraRow(lora, index) {
  const words = state.loras.find((known) => known.id === lora.name)?.trigger_words ?? [];
  const unused = words.filter((word) => !draft.prompt.includes(word));
  return html`
    <div class="row">
      <span class="chip">${lora.name}</span>
      ${smallNumber(`bottega.loras[${index}].scale`, "Strength", lora, "scale", { step: "0.1" })}
      ${remover(`Remove the LoRA ${lora.name}`, () => setDraft({ loras: cut(draft.loras, index) }))}
    </div>
    ${ofTheJob(lora)} ${unused.length ? html`<p class="hint">Its words in a prompt: ${unused.join(", ")}</p>` : nothing}
  `;
}

export function controlNetFields() {
  const known = adaptersOf(state.controlnets);
  if (!known.length && !draft.controlnets.length) return nothing;
  return html`
    <fieldset>
      <legend>ControlNets</legend>
      ${draft.controlnets.map((net, index) => controlNetRow(net, index))}
      ${adder("controlnet", "Add a ControlNet", known, draft.controlnets, (name) => {
        const net = { name, scale: "1", start: "0", end: "1", mode: "", image: null, kept: {} };
        setDraft({ controlnets: [...draft.controlnets, net] });
      })}
    </fieldset>
  `;
}

function controlNetRow(net, index) {
  const path = `bottega.controlnets[${index}]`;
  return html`
    <div class="net">
      <div class="row">
        <span class="chip">${net.name}</span>
        ${remover(`Remove the ControlNet ${net.name}`, () => setDraft({ controlnets: cut(draft.controlnets, index) }))}
      </div>
      ${field(
        `${path}.image`,
        `Control image of ${net.name}`,
        ({ id, about, invalid }) => html`
          <div class="control-image">
            ${net.image ? html`<img src=${net.image.url} alt="Control image of ${net.name}" />` : nothing}
            <input
              id=${id}
              type="file"
              accept="image/png,image/jpeg,image/webp"
              aria-describedby=${about}
              aria-invalid=${invalid}
              @change=${(event) => chooseImage(net, path, event)}
            />
          </div>
        `,
        { wide: true },
      )}
      <div class="row">
        ${modeField(net, `${path}.control_mode`)}
        ${smallNumber(`${path}.controlnet_conditioning_scale`, "Strength", net, "scale", { step: "0.1" })}
        ${smallNumber(`${path}.control_guidance_start`, "From", net, "start", { step: "0.05", max: "1" })}
        ${smallNumber(`${path}.control_guidance_end`, "To", net, "end", { step: "0.05", max: "1" })}
      </div>
      ${ofTheJob(net)}
    </div>
  `;
}

// A union follows control images of several kinds, and has to know of which kind its image is.
function modeField(net, name) {
  const count = state.controlnets.find((known) => known.id === net.name)?.control_modes;
  if (!count) return nothing;
  const modes = ["", ...Array.from({ length: count }, (_, mode) => MODES[mode] ?? String(mode))];
  const chosen = MODES[net.mode] ?? net.mode;
  return field(
    name,
    "Image shows",
    ({ id, about, invalid }) => html`
      <select
        id=${id}
        aria-describedby=${about}
        aria-invalid=${invalid}
        @change=${(event) => {
          net.mode = event.target.value;
          update();
        }}
      >
        ${modes.map(
          (mode) => html`<option value=${mode} .selected=${mode === chosen}>${mode || "Choose …"}</option>`,
        )}
      </select>
    `,
  );
}

async function chooseImage(net, path, event) {
  const [file] = event.target.files;
  if (!file) return;
  try {
    net.image = await readPicture(file);
    const { [`${path}.image`]: _, ...errors } = state.errors;
    update({ errors });
  } catch (error) {
    if (!(error instanceof NotAPicture)) throw error;
    net.image = null;
    event.target.value = "";
    update({ errors: { ...state.errors, [`${path}.image`]: error.message } });
    say(error.message);
  }
}

// A number of a LoRA or a ControlNet.
function smallNumber(name, label, item, key, { step, max }) {
  return numberInput(name, label, {
    step,
    max,
    min: max && "0",
    value: item[key],
    onInput: (event) => {
      item[key] = event.target.value;
      update();
    },
  });
}

function adder(kind, label, known, used, add) {
  const free = known.filter((adapter) => !used.some((item) => item.name === adapter.id));
  if (!free.length) return nothing;
  return html`
    <select
      class="adder"
      aria-label=${label}
      data-adder=${kind}
      @change=${(event) => {
        const name = event.target.value;
        event.target.value = "";
        if (name) add(name);
      }}
    >
      <option value="">${label} …</option>
      ${free.map((adapter) => html`<option value=${adapter.id}>${adapter.id}</option>`)}
    </select>
  `;
}

function remover(label, remove) {
  return html`<button type="button" class="quiet" aria-label=${label} title=${label} @click=${remove}>✕</button>`;
}

// The fields of an adapter that the form does not show.
function ofTheJob(item) {
  return keptFields(item.kept, (names) => {
    item.kept = without(item.kept, names);
    update();
  });
}

const cut = (list, index) => list.filter((_, at) => at !== index);
