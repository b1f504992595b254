// Fields of forms: each has a label, and says below it what is wrong with it.

import { html, nothing } from "./vendor/lit-html.js";
import { draft, setDraft } from "./draft.js";
import { state, update } from "./store.js";

// The problem of a field. `name` is the API's, such as bottega.seed.
const problemOf = (name) => state.errors[name];

const idOf = (name) => `f-${name.replaceAll(/[^a-z0-9]+/gi, "-")}`;

function clearProblem(name) {
  if (!(name in state.errors)) return;
  const { [name]: _, ...errors } = state.errors;
  update({ errors });
}

// A labelled control. `control` gets the attributes that tie it to its label and its problem.
export function field(name, label, control, { hint = "", wide = false } = {}) {
  const id = idOf(name);
  const problem = problemOf(name);
  const about = problem ? `${id}-problem` : hint ? `${id}-hint` : nothing;
  return html`
    <div class="field ${wide ? "wide" : ""}">
      <label for=${id}>${label}</label>
      ${control({ id, about, invalid: problem ? "true" : nothing })}
      ${problem ? html`<p class="problem" id="${id}-problem">${problem}</p>` : nothing}
      ${hint && !problem ? html`<p class="hint" id="${id}-hint">${hint}</p>` : nothing}
    </div>
  `;
}

export function numberField(name, label, key, options = {}) {
  return numberInput(name, label, { ...options, value: draft[key], onInput: (event) => changed(name, key, event) });
}

export function numberInput(name, label, { value, onInput, hint, placeholder = "", min, max, step = "1" }) {
  return field(
    name,
    label,
    ({ id, about, invalid }) => html`
      <input
        id=${id}
        type="number"
        inputmode="decimal"
        min=${min ?? nothing}
        max=${max ?? nothing}
        step=${step}
        placeholder=${placeholder}
        aria-describedby=${about}
        aria-invalid=${invalid}
        .value=${value}
        @input=${onInput}
      />
    `,
    { hint },
  );
}

export function textField(name, label, key, { rows = 2, placeholder = "", hint } = {}) {
  return field(
    name,
    label,
    ({ id, about, invalid }) => html`
      <textarea
        id=${id}
        rows=${rows}
        placeholder=${placeholder}
        aria-describedby=${about}
        aria-invalid=${invalid}
        .value=${draft[key]}
        @input=${(event) => changed(name, key, event)}
        @keydown=${submitOnCtrlEnter}
      ></textarea>
    `,
    { hint, wide: true },
  );
}

// options: [value, text] pairs.
export function choiceField(name, label, key, options, { hint } = {}) {
  return field(
    name,
    label,
    ({ id, about, invalid }) => html`
      <select
        id=${id}
        aria-describedby=${about}
        aria-invalid=${invalid}
        @change=${(event) => changed(name, key, event)}
      >
        ${options.map(([value, text]) => html`<option value=${value} .selected=${draft[key] === value}>${text}</option>`)}
      </select>
    `,
    { hint },
  );
}

function changed(name, key, event) {
  clearProblem(name);
  setDraft({ [key]: event.target.value });
}

function submitOnCtrlEnter(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form?.requestSubmit();
}

// Violations of fields that the page does not show.
export function otherProblems() {
  return Object.entries(state.errors).filter(([name]) => !document.getElementById(idOf(name)));
}
