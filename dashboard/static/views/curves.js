// Metrics over steps or wall time, of one run or several. A chart of nothing is left out, and one of `changing` numbers where they stay.
import {html, useState, useEffect, useMemo, useLive, get, api, go, link, runColor, css, useRun, useTheme, Problem, recorded} from '/static/lib.js';
import {sampledVersion} from '/static/recorded.js';
import {Chart, smooth} from '/static/chart.js';

const CHARTS = [
  {title: 'reward', lines: [['reward_mean', 'reward']], smoothed: true, evaluations: true},
  {title: 'idle', unit: '%', lines: [['learner_idle', 'learner waits'], ['rollout_idle', 'slots empty']]},
  {title: 'tokens per second', lines: [['rollout_tokens_per_s', 'generated'], ['overlap_tokens_per_s', 'while the learner steps'], ['learner_tokens_per_s', 'learner, with context']]},
  {title: 'staleness, versions', lines: [['staleness_mean', 'mean'], ['staleness_max', 'maximum']]},
  {title: 'seconds of a step', lines: [['wait_s', 'wait'], ['step_s', 'step'], ['push_s', 'push']]},
  {title: 'tokens of a step', lines: [['tokens_trained', 'trained'], ['tokens_withheld', 'withheld'], ['tokens_discarded', 'discarded']]},
  {title: 'groups of equal rewards', lines: [['groups_alike', 'in the batch'], ['groups_refilled', 'refilled']]},
  {title: 'effective sample size', lines: [['ess', 'ess']]},
  {title: 'KL behavior ‖ current, nats', lines: [['kl', 'kl']]},
  {title: 'entropy, nats', lines: [['entropy', 'entropy']]},
  {title: 'clipped share of tokens', lines: [['clip_fraction', 'clipped'], ['dropped_fraction', 'dropped']]},
  {title: 'importance ratio', lines: [['ratio_p999', 'one token in a thousand'], ['ratio_max', 'largest']]},
  {title: 'mismatch of the engine, nats', lines: [['mismatch_max', 'largest'], ['canary', 'canary']]},
  {title: 'loss', lines: [['loss', 'loss'], ['value_loss', 'value']]},
  {title: 'gradient norm', lines: [['grad_norm', 'norm']]},
  {title: 'tokens per episode', lines: [['episode_tokens_mean', 'tokens']]},
  {title: 'turns per episode', lines: [['turns_mean', 'turns']]},
  {title: 'truncated share', unit: '%', lines: [['truncated', 'truncated']]},
  {title: 'pause of a push, ms', lines: [['pause_ms', 'pause'], ['transfer_ms', 'transfer']]},
  {title: 'episode slots', lines: [['slots', 'slots']]},
  {title: 'replicas', lines: [['replicas', 'pushed'], ['replicas_failed', 'failed']], changing: true},
];
const METRICS = [...new Set(CHARTS.flatMap(chart => chart.lines.map(([name]) => name)))];
const COLORS = ['blue', 'orange', 'green'];
const DASHES = [undefined, [6, 4], [2, 3]];

export function Curves({run, runs}) {
  const [others, setOthers] = useState([]);
  const toggle = name => setOthers(others.includes(name) ? others.filter(one => one !== name) : [...others, name]);
  return html`<h1>${run.name}</h1>
    ${runs.length > 1 && html`<div class="row card"><span class="muted small">beside</span>${runs.filter(one => one.name !== run.name).map(one => html`<button key=${one.name} class=${others.includes(one.name) ? 'on' : ''} onClick=${() => toggle(one.name)}>${one.name}</button>`)}</div>`}
    <${Comparison} runs=${runs} chosen=${[run.name, ...others]} />`;
}

export function Comparison({runs, chosen}) {
  const {changes} = useLive(), dark = useTheme();
  const [x, setX] = useState('steps'), [found, setFound] = useState({}), [own, setOwn] = useState([]), [error, setError] = useState();
  const names = [...METRICS, ...own];
  useEffect(() => {
    let wanted = true;
    const asked = chosen.map(run => get(api(run, 'curves', {names: names.join(',')})).then(data => [run, data]));
    Promise.all(asked).then(all => { if (wanted) { setFound(Object.fromEntries(all)); setError(); } }, problem => wanted && setError(problem.message));
    return () => { wanted = false; };
  }, [chosen.join('\n'), own.join(), ...chosen.map(run => changes[run])]);
  const shown = chosen.filter(run => found[run]);
  const drawn = useMemo(() => [...CHARTS, ...own.map(name => ({title: name, lines: [[name, name]]}))]
    .map(chart => plan(chart, shown, found, x, chosen)).filter(chart => chart), [found, x, chosen.join('\n'), own.join(), dark]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!shown.length) return html`<p class="muted">reading</p>`;
  const more = [...new Set(shown.flatMap(run => found[run].names))].filter(name => !METRICS.includes(name) && !['step', 'version', 'time', 'lr'].includes(name));
  if (!drawn.length) return html`<div class="card">No step has been recorded.</div>`;
  const pick = shown.length === 1 && x === 'steps' ? step => openStep(shown[0], found[shown[0]], step) : undefined;
  return html`<div class="row card"><span class="muted small">over</span>
      ${[['steps', 'steps'], ['seconds', 'wall time, s']].map(([name, text]) => html`<button key=${name} class=${x === name ? 'on' : ''} onClick=${() => setX(name)}>${text}</button>`)}
      ${more.length > 0 && html`<select aria-label="another metric" value="" onChange=${event => event.target.value && setOwn([...new Set([...own, event.target.value])])}><option value="">another metric …</option>${more.map(name => html`<option value=${name} key=${name}>${name}</option>`)}</select>`}
      ${shown.length > 1 && html`<div class="chips">${shown.map(run => html`<span class="chip key" key=${run}><i style=${{background: runColor(chosen.indexOf(run))}}></i>${run}</span>`)}</div>`}
      <span class="muted small">drag to zoom, double-click for all${pick ? '; a click lists the trajectories of that step' : ''}</span></div>
    <div class="cards">${drawn.map(chart => html`<${Chart} key=${chart.title} ...${chart} sync=${x} pick=${pick} />`)}</div>`;
}

// One of the charts, of one run.
export function Curve({run, title}) {
  const dark = useTheme(), chart = CHARTS.find(one => one.title === title);
  const {data, error} = useRun(run.name, 'curves', {names: chart.lines.map(([name]) => name).join(',')});
  const drawn = useMemo(() => data && plan(chart, [run.name], {[run.name]: data}, 'steps', [run.name]), [data, dark]);
  if (error) return html`<${Problem} error=${error} />`;
  return drawn && html`<${Chart} ...${drawn} sync="steps" pick=${step => openStep(run.name, data, step)} />`;
}

// The trajectories that were trained at a step; in a file those of the nearest step that it has.
export function openStep(run, {steps, versions}, step) {
  const version = versions[steps.indexOf(step)];
  if (version != null) go(run, 'trajectories', '', {trained_at: recorded ? sampledVersion(version) : version});
}

// The data and lines of a chart; null where no run has any.
function plan(chart, shown, found, x, chosen) {
  const tables = [], lines = [], several = shown.length > 1;
  if (chart.changing && shown.every(run => chart.lines.every(([name]) => new Set(found[run].columns[name]).size < 2))) return null;
  const marks = shown.flatMap(run => found[run].marks.map(mark => ({x: mark[x], text: mark.text, color: several ? runColor(chosen.indexOf(run)) : css('muted')})));
  for (const run of shown) {
    const data = found[run], table = [data[x]];
    chart.lines.forEach(([name, label], i) => {
      const values = data.columns[name];
      if (!values || !values.some(value => value)) return;
      const color = several ? runColor(chosen.indexOf(run)) : css(COLORS[i]);
      const text = several ? (chart.lines.length > 1 ? `${run}: ${label}` : run) : label;
      if (chart.smoothed && values.length >= 8) {
        if (!several) { table.push(values); lines.push({label: text, color: color + '66', width: 1}); }
        table.push(smooth(values)); lines.push({label: several ? text : 'smoothed', color, width: 2.2});
      } else { table.push(values); lines.push({label: text, color, dash: several ? DASHES[i] : undefined}); }
    });
    if (table.length > 1) tables.push(table);
    if (chart.evaluations && x === 'steps' && data.evaluations.length) {
      const suites = [...new Set(data.evaluations.map(one => one.evaluation))];
      for (const suite of suites) {
        const points = data.evaluations.filter(one => one.evaluation === suite).sort((a, b) => a.step - b.step);
        tables.push([points.map(one => one.step), points.map(one => one.reward_mean)]);
        lines.push({label: `${several ? run + ': ' : ''}evaluation${suite ? ' ' + suite : ''}`, color: several ? runColor(chosen.indexOf(run)) : css('green'), points: true});
      }
    }
  }
  return tables.length ? {title: chart.title, unit: chart.unit, tables, lines, marks} : null;
}
