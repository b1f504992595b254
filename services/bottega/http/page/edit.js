// The view in which a part of a picture is drawn anew.

import { html, nothing } from "./vendor/lit-html.js";
import { getBlob } from "./api.js";
import { chosenModel, fillFrom } from "./draft.js";
import { field } from "./fields.js";
import { requestForm } from "./form.js";
import { start } from "./job.js";
import { keptForEditOf } from "./kept.js";
import {
  addShape,
  beginStroke,
  clear,
  endStroke,
  extendStroke,
  maskBlob,
  paintOverlay,
  scaleOf,
  undo,
} from "./mask.js";
import { NotAPicture, readPicture } from "./pictures.js";
import { show } from "./router.js";
import { stage } from "./stage.js";
import { say, state, update } from "./store.js";

export function editView() {
  const refusal = chosenModel()?.bottega.edits_refused_because;
  return html`
    <div class="columns">
      ${requestForm({ submit, verb: "Edit", isEdit: true, before: source() })}
      <div class="stack pair">
        ${refusal ? html`<p class="failure">The model draws no edits: ${refusal}</p>` : nothing}
        ${state.source ? easel() : nothing}
        ${stage(state.job?.view === "edit" ? state.job : null, "The edited picture appears here.")}
      </div>
    </div>
  `;
}

// Draw the mask after the page was drawn.
export function afterDraw() {
  const canvas = document.querySelector(".easel canvas");
  if (canvas) paintOverlay(canvas);
}

async function submit() {
  const { source } = state;
  if (!source) return start({ view: "edit" });
  const mask = await maskBlob(source.width, source.height);
  return start({ view: "edit", edit: { image: source.blob, mask } });
}

function source() {
  return field(
    "image",
    "Picture to edit",
    ({ id, about, invalid }) => html`
      <input
        id=${id}
        type="file"
        accept="image/png,image/jpeg,image/webp"
        aria-describedby=${about}
        aria-invalid=${invalid}
        @change=${(event) => choose(event.target.files[0])}
      />
    `,
    { wide: true, hint: state.source ? `${state.source.name}, ${state.source.width} × ${state.source.height}` : "" },
  );
}

// Take a file, or say why it cannot be used.
export async function choose(file) {
  if (!file) return;
  const { image: _, ...errors } = state.errors;
  try {
    const source = await readPicture(file);
    update({ source, shapes: [], errors, failure: "" });
  } catch (error) {
    if (!(error instanceof NotAPicture)) throw error;
    update({ source: null, shapes: [], errors: { ...errors, image: error.message } });
    say(error.message);
  }
}

// Edit a picture that the suite has drawn.
export async function editPicture(picture, job) {
  const source = await readPicture(picture.blob, `Picture ${picture.index + 1} of ${job.id}`);
  if (job.parameters) fillFromPicture(job.parameters, picture.index);
  update({ source, shapes: [], errors: {}, failure: "" });
  show("edit");
}

// Fill the form with what an edit of a picture shares with the drawing of it.
function fillFromPicture(parameters, index) {
  const { prompts } = parameters;
  const lora = parameters.lora.map(({ name, scale }) => ({ name, scale }));
  const own = { prompts: [], num_images: 1, guidance_scale: null, strength: null, controlnets: [], lora };
  const prompt = prompts[index] ?? parameters.prompt;
  fillFrom({ ...parameters, ...own, prompt }, { kept: keptForEditOf(parameters) });
}

export async function editFromHistory(job, image) {
  await editPicture({ blob: await getBlob(image.url), index: image.index }, job);
}

function easel() {
  const { source, shapes } = state;
  return html`
    <section class="panel easel" aria-label="Mask">
      <p class="hint" id="easel-hint">
        Paint over what shall be drawn anew, or add rectangles by numbers. Without a mask the whole picture is.
      </p>
      <div class="canvas">
        <img src=${source.url} alt="The picture to edit" draggable="false" />
        <canvas
          width=${source.width * scaleOf(source)}
          height=${source.height * scaleOf(source)}
          aria-label="Mask: ${maskText(shapes.length)}"
          aria-describedby="easel-hint"
          role="img"
          @pointerdown=${beginStroke}
          @pointermove=${extendStroke}
          @pointerup=${endStroke}
          @pointercancel=${endStroke}
        ></canvas>
      </div>
      ${tools()} ${rectangle(source)}
    </section>
  `;
}

const maskText = (count) => (count === 0 ? "empty" : count === 1 ? "one shape" : `${count} shapes`);

function tools() {
  const { brush, shapes } = state;
  const set = (changes) => update({ brush: { ...brush, ...changes } });
  return html`
    <div class="row tools">
      <label class="slider">
        Brush
        <input
          type="range"
          min="1"
          max="40"
          aria-label="Size of the brush"
          .value=${String(brush.size)}
          @input=${(event) => set({ size: Number(event.target.value) })}
        />
      </label>
      <button type="button" aria-pressed=${brush.erases} @click=${() => set({ erases: !brush.erases })}>Erase</button>
      <button type="button" ?disabled=${!shapes.length} @click=${undo}>Undo</button>
      <button type="button" ?disabled=${!shapes.length} @click=${clear}>Clear</button>
    </div>
  `;
}

function rectangle(source) {
  const limits = { x: source.width, y: source.height, width: source.width, height: source.height };
  const labels = { x: "Left", y: "Top", width: "Width", height: "Height" };
  return html`
    <form class="row tools" aria-label="Add a rectangle to the mask" @submit=${addRectangle}>
      ${Object.entries(labels).map(
        ([name, label]) => html`
          <label class="small">
            ${label}
            <input type="number" name=${name} min=${name.length > 1 ? 1 : 0} max=${limits[name]} required />
          </label>
        `,
      )}
      <button type="submit">Add rectangle</button>
    </form>
  `;
}

function addRectangle(event) {
  event.preventDefault();
  const values = Object.fromEntries([...new FormData(event.target)].map(([name, value]) => [name, Number(value)]));
  addShape({ kind: "box", ...values });
  say(`A rectangle was added to the mask: ${maskText(state.shapes.length)}.`);
  event.target.reset();
}
