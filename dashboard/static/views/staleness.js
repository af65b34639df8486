// How old the trained tokens were, and what the correction did about it.
import {html, useState, useEffect, useMemo, useRun, useLive, get, api, css, stalenessColor, count, share, useTheme, Problem} from '/static/lib.js';
import {Chart} from '/static/chart.js';
import {Bars} from '/static/bars.js';
import {openStep} from '/static/views/curves.js';

const METRICS = [['ess', 'effective sample size'], ['kl', 'KL behavior ‖ current, nats'], ['clip_fraction', 'clipped share'], ['weight', 'importance weight of a token, 1 for the average']];
const OVER_STEPS = [['ess_by_staleness', 'effective sample size'], ['kl_by_staleness', 'KL behavior ‖ current, nats'], ['clip_fraction_by_staleness', 'clipped share of tokens'], ['staleness_tokens', 'tokens trained']];

export function Staleness({run}) {
  const {data, error} = useRun(run.name, 'staleness');
  const change = useLive().changes[run.name], dark = useTheme(), [curves, setCurves] = useState();
  const ages = data ? Object.keys(data.tokens).map(Number).sort((a, b) => a - b) : [];
  useEffect(() => {
    if (!ages.length) return;
    let wanted = true;
    const names = [...OVER_STEPS.flatMap(([metric]) => ages.map(age => `${metric}/${age}`)), 'mismatch_max', 'canary'];
    get(api(run.name, 'curves', {names: names.join(',')})).then(found => wanted && setCurves(found), () => {});
    return () => { wanted = false; };
  }, [ages.join(), change]);
  const charts = useMemo(() => !curves ? [] : [...OVER_STEPS.map(([metric, title]) => [title, ages.map(age => [`${metric}/${age}`, `staleness ${age}`, stalenessColor(age)])]),
    ['difference of learner and engine, nats', [['mismatch_max', 'mismatch, tokens of staleness 0', css('blue')], ['canary', 'canary after a push', css('orange')]]]]
    .map(([title, lines]) => ({title, lines: lines.filter(([name]) => curves.columns[name]?.some(value => value))}))
    .filter(chart => chart.lines.length)
    .map(({title, lines}) => ({title, tables: [[curves.steps, ...lines.map(([name]) => curves.columns[name])]], lines: lines.map(([, label, color]) => ({label, color}))})), [curves, dark]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!data) return html`<p class="muted">reading</p>`;
  const total = ages.reduce((sum, age) => sum + data.tokens[age], 0);
  if (!total) return html`<h1>${run.name}</h1><div class="card">No token has been trained on.</div>`;
  const pick = step => openStep(run.name, curves, step);
  return html`<h1>${run.name}</h1><div class="cards">
      <${Bars} title="trained tokens by staleness" label="staleness" note=${`In ${data.steps} steps; the bound is ${data.bound ?? 'not known'}. Staleness is the learner's version less the version that sampled the token.`}
        rows=${ages.map(age => ({name: String(age), href: `#/${encodeURIComponent(run.name)}/trajectories?staleness_min=${age}`, parts: [{value: data.tokens[age], color: stalenessColor(age)}], text: `${count(data.tokens[age])}, ${share(data.tokens[age] / total)}`}))} />
      ${METRICS.filter(([name]) => Object.values(data.metrics[name]).some(value => value)).map(([name, title]) => html`<${Bars} key=${name} title=${title} label="staleness"
        rows=${Object.entries(data.metrics[name]).map(([age, value]) => ({name: age, parts: [{value, color: stalenessColor(+age)}], text: count(value)}))} />`)}
      ${charts.map(chart => html`<${Chart} key=${chart.title} ...${chart} sync="steps" pick=${pick} />`)}
      <${Ratios} run=${run} />
    </div>`;
}

// Of single tokens, as far as the learner has recorded them.
function Ratios({run}) {
  const {data, error} = useRun(run.name, 'ratios');
  if (error) return html`<${Problem} error=${error} />`;
  if (!data || !data.steps) return data && html`<p class="muted small">Ratios of single tokens: none are recorded.</p>`;
  const ages = Object.keys(data.counts).map(Number).sort((a, b) => a - b), {edges} = data;
  const sums = [...edges, 0].map((_, bin) => ages.reduce((sum, age) => sum + data.counts[age][bin], 0)), total = sums.reduce((sum, one) => sum + one, 0);
  const name = bin => bin === 0 ? `below ${edges[0]}` : bin === edges.length ? `above ${edges[bin - 1]}` : `${edges[bin - 1]} to ${edges[bin]}`;
  const bins = sums.map((_, bin) => bin).filter(bin => sums[bin]);
  return html`<${Bars} title="log-ratio of trained tokens, nats" label="log-ratio" note=${`Of the current policy to the one that sampled the token, before the step; tokens of some groups of the newest ${data.steps} steps, by staleness as above. ${ages.map(age => `At staleness ${age} 99.9 % are within ${data.far[age].toPrecision(2)}`).join('. ')}.`}
      rows=${bins.map(bin => ({name: name(bin), parts: ages.map(age => ({value: data.counts[age][bin], color: stalenessColor(age), title: `staleness ${age}: ${data.counts[age][bin]} tokens`})), text: share(sums[bin] / total)}))} />
    ${Object.keys(data.replicas).length > 0 && html`<${Bars} title="largest difference of learner and replica, nats" label="replica" note="At tokens of staleness 0 of the same steps. With several minibatches in a step it includes what the minibatches before have changed."
      rows=${Object.entries(data.replicas).map(([replica, one]) => ({name: replica, parts: [{value: one.largest, color: css('blue')}], text: `${one.largest.toPrecision(2)}, ${count(one.tokens)} tokens`}))} />`}`;
}
