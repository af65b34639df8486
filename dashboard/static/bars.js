// Bars with their values, as rows of a table: read by eyes and by screen readers.
import {html} from '/static/lib.js';

// `rows`: {name, parts: [{value, color, title}], text, href}; all bars have one scale.
export function Bars({title, note, rows, label = 'name'}) {
  const largest = Math.max(1e-12, ...rows.map(row => row.parts.reduce((sum, part) => sum + part.value, 0)));
  return html`<div class="card"><h2>${title}</h2><table class="bars"><thead hidden><tr><th>${label}</th><th>share</th><th>value</th></tr></thead><tbody>
    ${rows.map(row => html`<tr key=${row.name}><td>${row.href ? html`<a href=${row.href}>${row.name}</a>` : row.name}</td>
      <td class="track"><div class="stack">${row.parts.map((part, i) => html`<i key=${i} title=${part.title || ''} style=${{width: `${100 * part.value / largest}%`, background: part.color}}></i>`)}</div></td><td>${row.text}</td></tr>`)}
    </tbody></table>${note && html`<p class="legend-note">${note}</p>`}</div>`;
}
