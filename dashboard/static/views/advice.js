// What `slipstream explain` says of the run: alerts, findings with their gains, and the commands to copy.
import {html, useState, useRun, Problem} from '/static/lib.js';

export function Advice({run, alerts}) {
  const {data, error} = useRun(run.name, 'explanation');
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return null;
  if (!data.known) return data.working ? html`<div class="card muted">looking for what to change: the run is simulated</div>` : null;
  const more = data.alerts.filter(one => !alerts.some(known => known.rule === one.rule && known.active));
  return html`${more.map(one => html`<${Alarm} key=${one.rule} alert=${{...one, active: true}} />`)}
    ${data.findings.map(one => html`<${Finding} key=${one.text} one=${one} />`)}
    ${(data.summary || data.note) && html`<p class="muted small">${[data.summary, data.note].filter(text => text).join('; ')}${data.working ? '; looks again' : ''}</p>`}`;
}

// Text in which commands stand between backticks.
const coded = text => text.split('`').map((part, i) => i % 2 ? html`<code>${part}</code>` : part);

export const Alarm = ({alert, when}) => html`<div class="card ${!alert.active ? '' : alert.severity === 'critical' ? 'bad' : 'warn'}">${alert.active ? '' : 'over: '}${alert.text}${alert.advice && html`: ${coded(alert.advice)}`} <span class="muted small">step ${alert.step}${when ? ', ' + when : ''}</span></div>`;

function Finding({one}) {
  const [open, setOpen] = useState(''), toggle = name => () => setOpen(open === name ? '' : name);
  return html`<div class="card finding ${one.severity === 'warning' ? 'warn' : 'hint'}">
    <div>${one.text}</div>
    <div class="change"><span aria-hidden="true">→ </span><code>${one.change}</code>${one.gain && html` <span class="gain">${one.gain}</span>`}</div>
    <div class="row">
      ${one.evidence.length > 0 && html`<button aria-expanded=${open === 'why'} class=${open === 'why' ? 'on' : ''} onClick=${toggle('why')}>why</button>`}
      ${one.command && html`<${Copy} text=${one.command} name="copy" />`}
      ${one.simulate && html`<button aria-expanded=${open === 'simulate'} class=${open === 'simulate' ? 'on' : ''} onClick=${toggle('simulate')}>simulate</button>`}</div>
    ${open === 'why' && html`<p class="small why">${one.evidence.join(', ')}</p>`}
    ${open === 'simulate' && html`<p class="small why">With this value beside the run's own: <${Copy} text=${one.simulate} name="copy" /> <code>${one.simulate}</code></p>`}
    ${one.command && one.command !== one.change && html`<p class="small muted command"><code>${one.command}</code></p>`}</div>`;
}

// Without a secure connection a page may not write to the clipboard: the command is there to be selected.
function Copy({text, name}) {
  const [done, setDone] = useState(false);
  const copy = () => navigator.clipboard.writeText(text).then(() => { setDone(true); setTimeout(() => setDone(false), 1500); });
  return navigator.clipboard ? html`<button title=${text} onClick=${copy}>${done ? 'copied' : name}</button>` : null;
}
