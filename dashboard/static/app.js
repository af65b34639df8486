// The page: which run, which view. Views are modules of their own.
import {render} from '/static/vendor/preact.js';
import {html, useState, useEffect, listen, useLive, useData, parse, link, date, recorded, Problem} from '/static/lib.js';
import {Now, Runs} from '/static/views/now.js';
import {Curves} from '/static/views/curves.js';
import {Trajectories} from '/static/views/trajectories.js';
import {Trajectory} from '/static/views/trajectory.js';
import {Group} from '/static/views/group.js';
import {Staleness} from '/static/views/staleness.js';
import {Timeline} from '/static/views/timeline.js';
import {Accounts} from '/static/views/accounts.js';
import {Environments} from '/static/views/environments.js';
import {Processes} from '/static/views/processes.js';

const VIEWS = {now: Now, curves: Curves, trajectories: Trajectories, trajectory: Trajectory, group: Group,
  staleness: Staleness, timeline: Timeline, tokens: Accounts, environments: Environments, processes: Processes, all: All};
const TABS = [['now', 'now'], ['curves', 'curves'], ['trajectories', 'trajectories'], ['staleness', 'staleness'], ['timeline', 'timeline'],
  ['tokens', 'tokens'], ['environments', 'environments'], ['processes', 'processes']];
const FILED = [['now', 'summary'], ...TABS.slice(1), ['all', 'all']];  // of an exported page
const BELONGS = {trajectory: 'trajectories', group: 'trajectories'};

// What a file has to be read, or printed, from above to below.
function All({run, runs}) {
  return ['now', 'curves', 'staleness', 'timeline', 'tokens', 'environments', 'processes'].map(name => html`<section key=${name} class="part">${name !== 'now' && html`<h2 class="part">${name}</h2>`}<${VIEWS[name]} run=${run} runs=${runs} query=${{}} /></section>`);
}

function App() {
  const [at, setAt] = useState(parse());
  const {changes, connected} = useLive();
  useEffect(() => {
    const moved = () => { setAt(parse()); scrollTo(0, 0); };
    addEventListener('hashchange', moved);
    return () => removeEventListener('hashchange', moved);
  }, []);
  useEffect(() => { document.querySelector('nav a.on')?.scrollIntoView({inline: 'center', block: 'nearest'}); });
  const {data: listed, error} = useData('/api/runs', JSON.stringify(changes));
  if (!listed) return html`<main>${error ? html`<${Problem} error=${error} />` : html`<p class="muted">reading</p>`}</main>`;
  const {runs} = listed, several = runs.length > 1;
  const run = runs.find(one => one.name === at.run) || (several ? null : runs[0]);
  const view = run ? (VIEWS[at.view] ? at.view : 'now') : 'runs';
  document.title = run ? `${run.name} · Slipstream` : 'Slipstream';
  const state = recorded ? ['', `as of ${date(recorded.time)}`] : connected === false ? ['lost', 'the server is gone'] : run?.active ? ['on', 'running'] : ['', run ? 'not running' : `${runs.length} runs`];
  const View = VIEWS[view];
  return html`<header><div class="bar">
      <a class="brand" href=${several ? '#/' : link(runs[0].name)}>slipstream</a>
      ${several && html`<select aria-label="run" value=${run?.name || ''} onChange=${event => { location.hash = event.target.value ? link(event.target.value, view === 'runs' ? 'now' : BELONGS[view] || view) : '#/'; }}>
        <option value="">all runs</option>${runs.map(one => html`<option value=${one.name} key=${one.name}>${one.name}</option>`)}</select>`}
      ${run && html`<nav aria-label="views">${(recorded ? FILED : TABS).map(([name, text]) => html`<a key=${name} href=${link(run.name, name)} class=${(BELONGS[view] || view) === name ? 'on' : ''}>${text}</a>`)}</nav>`}
      <span class="live ${state[0]}"><i></i>${state[1]}</span>
    </div></header>
    <main>${run?.error && html`<${Problem} error=${run.error} />`}
      ${view === 'runs' ? html`<${Runs} listed=${listed} />` : html`<${View} key=${run.name + view} run=${run} runs=${runs} id=${at.id} query=${at.query} />`}</main>`;
}

listen();
render(html`<${App} />`, document.getElementById('app'));
