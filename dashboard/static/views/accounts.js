// Where tokens go: the ledger, in all, by the length of their episodes, and by the version that sampled them.
import {html, useRun, count, share, Problem} from '/static/lib.js';
import {Bars} from '/static/bars.js';

const COLORS = {trained: 'green', ready: 'blue', in_flight: 'muted'};
const color = account => `var(--${COLORS[account] || (account.startsWith('withheld_') ? 'orange' : 'red')})`;
const text = account => account.startsWith('withheld_') ? `withheld: ${account.slice(9)}` : account in COLORS ? account.replace('_', ' ') : `discarded: ${account.replaceAll('_', ' ')}`;
const VERSIONS = 60;

export function Accounts({run}) {
  const {data, error} = useRun(run.name, 'tokens');
  if (error) return html`<${Problem} error=${error} />`;
  if (data === undefined) return html`<p class="muted">adding up</p>`;
  if (!data || !data.generated) return html`<h1>${run.name}</h1><div class="card">No token has been generated.</div>`;
  const order = Object.keys(data.accounts), total = accounts => Object.values(accounts).reduce((a, b) => a + b, 0);
  const parts = accounts => order.filter(name => accounts[name]).map(name => ({value: accounts[name], color: color(name), title: `${text(name)}: ${accounts[name]}`}));
  const trained = accounts => (accounts.trained || 0) / total(accounts);
  return html`<h1>${run.name}</h1>
    <${Bars} title=${`${count(data.generated)} tokens were generated`} label="account" rows=${order.map(name => ({name: text(name), parts: [{value: data.accounts[name], color: color(name)}], text: `${count(data.accounts[name])}, ${share(data.accounts[name] / data.generated)}`}))} />
    <div class="cards"><${Bars} title="by length of the episode" label="tokens" note="If long episodes are trained on less than short ones, the policy learns to be brief."
      rows=${data.by_length.map(row => ({name: row.length ? `${row.length} to ${2 * row.length - 1}` : '0', parts: parts(row.accounts), text: `${share(trained(row.accounts))} trained`}))} />
    <${Bars} title=${`by version that sampled${data.by_version.length > VERSIONS ? `, the newest ${VERSIONS}` : ''}`} label="version"
      rows=${data.by_version.slice(-VERSIONS).map(row => ({name: String(row.version), parts: parts(row.accounts), text: count(total(row.accounts))}))} /></div>`;
}
