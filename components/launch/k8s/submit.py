"""The Kubernetes scheduler: checks of the config and of the cluster, and the creation of a job, with kubectl."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from components.config.schema.cluster import ClusterConfig
from components.config.schema.recipes import RecipeConfig
from components.config.schema.schedulers import Workload
from components.launch.backend import CheckedRun, Job
from components.launch.job.scheduler import (
    LOCAL_FILE_SYSTEMS,
    Findings,
    Scheduler,
    UnknownSubmission,
    file_system,
    named_paths,
)
from components.launch.k8s.kubectl import (
    AT_ONCE,
    RUN_LABEL,
    Answer,
    JobName,
    PodManifest,
    Unreachable,
    code_in_pods,
    create,
    delete,
    get,
    is_workload,
    may,
    mounted_at,
    new_job_name,
    objects_in,
    pod_resources,
    recipe_in_pods,
    render_manifest,
    state_of,
)
from components.launch.run_checks import affects
from components.package import PROJECT
from components.protocol.errors import ConfigError, raise_all
from components.protocol.run_files import JOB_MANIFEST, LOGS

_TRIES, PAUSE = 3, 2.0
"""Number of attempts to create a job if the cluster does not answer, and the seconds between them."""
_SUFFIXES = {"m": 1e-3, "": 1.0}
_SUFFIXES |= {suffix: 1e3**power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), 1)}
_SUFFIXES |= {f"{suffix}i": 1024.0**power for power, suffix in enumerate(("K", "M", "G", "T", "P", "E"), 1)}
_SHARED_MODES = ("ReadWriteMany", "RWX")


class KubernetesScheduler(Scheduler):
    """Kubernetes: objects created with kubectl. Job ids are NAMESPACE/job/NAME or NAMESPACE/jobset/NAME, and @CONTEXT.

    The id is chosen here and is the tag of the submission, too.
    """

    name, file, unit, copies_code = "Kubernetes", JOB_MANIFEST, ("in", "pod"), False

    def problems(self, cfg: RecipeConfig, rejected: Collection[str]) -> Findings:
        """Check image, volumes and paths, and with kubectl the namespace, permissions, claims, quota and manifest."""
        return ([], []) if affects(rejected, ["cluster"]) else job_problems(cfg)

    def render(self, run: CheckedRun, tag: str) -> str:
        """Return the manifest. Raises ConfigError if the pods cannot read the recipe."""
        cluster, problems = run.cfg.cluster, _recipe_problems(run)
        raise_all([] if cluster.only_renders else problems)
        run.notes.extend(_as_notes(problems))
        recipe = recipe_in_pods(run.recipe.file)
        return render_manifest(PodManifest(cluster, _name(tag), run.directory.path, recipe, Path.cwd()))

    def new_tag(self, run: CheckedRun) -> str:
        """Return a new job id."""
        return str(new_job_name(run.cfg.cluster, run.cfg.run.name or run.recipe.name))

    def send(self, run: CheckedRun, file: Path, tag: str) -> str:
        """Create the objects of the manifest; the others refer to the job as their owner, and are deleted with it."""
        job, cluster, objects = _name(tag), run.cfg.cluster, objects_in(file.read_text(), JOB_MANIFEST)
        workload = next(filter(is_workload, objects))
        try:
            answer = _create(job, workload, cluster)
            answer = get(job.context, job.path) if answer.status else answer
            uid = (answer.json().get("metadata") or {}).get("uid", "")
            owner = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": job.name, "uid": uid}
            for each in objects:
                if each is not workload:
                    each["metadata"]["ownerReferences"] = [owner]
                    _create(job, each, cluster)
        except Unreachable as error:
            raise UnknownSubmission(
                f"{error}\nIt is unknown whether the cluster has the job {job.name} and its other objects.\nThe run "
                f"directory {file.parent} is kept. Delete the job with {self.cancel_command(tag)}, or run the command "
                "again with this run.dir: it looks for the job"
            ) from error
        return tag

    def find(self, file: Path, tag: str) -> str | None:
        """Return the id if the cluster has the job."""
        answer = get(_name(tag).context, _name(tag).path)
        if answer.status and answer.reason != "NotFound":
            raise ConfigError(f"cluster.kind=k8s: the job {tag} cannot be queried: {answer.message}")
        return None if answer.status else tag

    def find_command(self, file: Path, tag: str) -> str:
        """Return a kubectl command."""
        return _name(tag).command("get", _name(tag).workload, _name(tag).name)

    def owns(self, job: str) -> bool:
        """Return whether an id has the form of this scheduler's."""
        return JobName.parse(job) is not None

    def query(self, jobs: Sequence[str]) -> dict[str, Job]:
        """Return the jobs, one request per job."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return {job.id: job for job in pool.map(state_of, map(_name, jobs))}

    def cancel(self, job: str) -> bool:
        """Delete a job: its pods receive SIGTERM, save and exit."""
        return delete(_name(job))

    def cancel_command(self, job: str) -> str:
        """Return the kubectl delete command."""
        return _name(job).command("delete", _name(job).workload, _name(job).name)

    def code_folder(self, run: CheckedRun) -> str:
        """Return the folder of the code in the pods."""
        return code_in_pods(run.cfg.cluster) or f"that of the image {run.cfg.cluster.k8s.image}"

    def summary(self, run: CheckedRun, job: str) -> list[tuple[str, str]]:
        """Return the commands to follow, stop and restart the job."""
        name, logs = _name(job), run.directory.path / LOGS
        pods = f"-l {RUN_LABEL}={name.name}"
        first = f"{pods},batch.kubernetes.io/job-completion-index=0"
        return [
            ("follow", name.command("logs", "-f", first)),
            ("", f"tail -F {shlex.quote(str(logs / 'latest' / 'rank_0.log'))}"),
            ("pods", name.command("describe", "pods", pods)),
            ("stop", self.cancel_command(job)),
            ("save, restart", name.command("delete", "pods", "--wait=false", first)),
        ]


def _name(job: str) -> JobName:
    """Return the name in an id of this scheduler."""
    name = JobName.parse(job)
    if name is None:
        raise ConfigError(f"{job}: is no id of a job on Kubernetes: NAMESPACE/job/NAME")
    return name


def _recipe_problems(run: CheckedRun) -> list[str]:
    """Check that the pods can read the recipe."""
    cluster, file = run.cfg.cluster, run.recipe.file
    if file.is_relative_to(PROJECT) or mounted_at(cluster, file) is not None:
        return []
    return [
        f"{file}: this recipe is on no volume of cluster.k8s.volumes, so that the pods could not read it; copy it to "
        f"one of {', '.join(cluster.k8s.volumes.values())}"
    ]


def _create(job: JobName, body: dict[str, Any], cluster: ClusterConfig) -> Answer:
    """Create an object of a job, and return the cluster's answer: success, or AlreadyExists.

    The server may carry out a request whose answer is lost: a repeated one is then refused as AlreadyExists, since no
    other job has this name.

    Raises:
        ConfigError: The cluster rejected it, and the job does not exist.
        Unreachable: The cluster did not answer any attempt.
    """
    for attempt in range(1, _TRIES + 1):
        try:
            answer = create(job.context, job.namespace, body)
            break
        except Unreachable:
            if attempt == _TRIES:
                raise
            time.sleep(PAUSE)
    if answer.status and answer.reason != "AlreadyExists":
        if not is_workload(body):
            delete(job)
        raise ConfigError(refusal(answer, cluster))
    return answer


def job_problems(cfg: RecipeConfig) -> Findings:
    """Return the problems of submitting `cfg`, and notes. The cluster is queried if there are none on this machine."""
    cluster = cfg.cluster
    problems, notes = _required_problems(cluster), _paths_outside(cfg)
    if cluster.template is not None and not Path(os.path.expanduser(cluster.template)).is_file():
        problems.append(f"cluster.template={cluster.template}: no such file")
    if not problems:
        here = _run_directory_problems(cfg)
        notes, problems = (notes + _as_notes(here), []) if cluster.only_renders else (notes, here)
    if cluster.most_nodes > 1 and cluster.k8s.queue is None:
        notes.append(
            "cluster.k8s.queue=null: without a queue some pods may hold nodes while others wait for theirs, until "
            f"cluster.startup_timeout_minutes={cluster.startup_timeout_minutes:g} ends the job"
        )
    if problems:
        return problems, notes
    try:
        name = new_job_name(cluster, "check")
        text = render_manifest(PodManifest(cluster, name, Path("/run"), "recipe.py", Path.cwd()))
    except ConfigError as error:
        return error.problems, notes
    if cluster.only_renders:
        return problems, notes + _unchecked(cluster)
    workload = next(each for each in objects_in(text, "manifest") if is_workload(each))
    answers = _ask(cluster, workload)
    return problems + answers[0], notes + answers[1]


def _as_notes(problems: list[str]) -> list[str]:
    """Return the problems of the place of a submission as notes, with cluster.dry_run=render."""
    return [f"a submission from here would be rejected: {problem}" for problem in problems]


def _unchecked(cluster: ClusterConfig) -> list[str]:
    """Return what a submission asks the cluster, one note each, with the keys and values."""
    k8s = cluster.k8s
    claims = ", ".join(f"volumes.{name}={path}" for name, path in k8s.volumes.items())
    resources = ", ".join(f"{name}: {amount}" for name, amount in pod_resources(cluster).items()) or "no resources"
    names = [*(k8s.image_pull_secrets), *k8s.secrets, *([k8s.service_account] if k8s.service_account else [])]
    others = ", ".join([*([f"queue {k8s.queue}"] if k8s.queue else []), *names])
    return [
        f"not checked: cluster.k8s.context={k8s.context or 'null (the current one)'}, namespace={k8s.namespace}: "
        "whether they exist, and whether you may create the job there",
        f"not checked: cluster.k8s.image={k8s.image}: whether the nodes can pull it, and what is in it",
        f"not checked: cluster.k8s.{claims}: whether the namespace has these persistent volume claims, and their "
        "access modes",
        f"not checked: {cluster.nodes} x {resources}: whether nodes and quotas have as much",
        *([f"not checked: {others}: whether the namespace has them"] if others else []),
        f"not checked: the fields of the manifest ({k8s.workload}), and the cluster's admission rules",
    ]


def _required_problems(cluster: ClusterConfig) -> list[str]:
    problems = []
    if cluster.k8s.image is None:
        problems.append(
            "cluster.k8s.image=null: the pods need an image with Meshbook's environment; set it, for all runs in "
            "conf/local/user.yaml"
        )
    if not cluster.k8s.volumes:
        problems.append(
            "cluster.k8s.volumes={}: the run directory must be on a volume that all pods share; set "
            "cluster.k8s.volumes.CLAIM=PATH"
        )
    return problems


def _run_directory_problems(cfg: RecipeConfig) -> list[str]:
    """Check that a volume contains the run directory, and that this machine mounts it at the same path."""
    path, cluster = Path(os.path.expanduser(cfg.run.dir or Path.cwd())).absolute(), cfg.cluster
    mount = mounted_at(cluster, path)
    if mount is None:
        mounts = ", ".join(cluster.k8s.volumes.values())
        return [
            f"run.dir={path}: is on no volume of cluster.k8s.volumes (mounted at {mounts}), so that the pods could not "
            "read it; set run.dir to a folder on one, or start from one"
        ]
    if not os.path.isdir(mount):
        return [
            f"cluster.k8s.volumes={cluster.k8s.volumes}: there is no folder {mount} here; submit from a machine or pod "
            "that mounts the volume at the same path"
        ]
    return []


def _paths_outside(cfg: RecipeConfig) -> list[str]:
    """Return notes on paths that the pods may not be able to access, or that may not be on the volume here."""
    notes, volumes = [], cfg.cluster.k8s.volumes
    paths = {key: Path(os.path.expanduser(name)) for key, name in named_paths(cfg).items() if name}
    outside = [
        f"{key}={path}"
        for key, path in paths.items()
        if key != "run.dir"
        and (path.is_absolute() or path.exists())
        and mounted_at(cfg.cluster, path.absolute()) is None
    ]
    if outside and volumes:
        notes.append(
            f"{', '.join(outside)}: on no volume of cluster.k8s.volumes; the image must contain it at this path"
        )
    run_dir = paths["run.dir"].absolute()
    if os.path.isdir(mounted_at(cfg.cluster, run_dir) or "") and (kind := file_system(run_dir)) in LOCAL_FILE_SYSTEMS:
        notes.append(f"the pods need access to run.dir ({kind}), but this file system looks local to this machine")
    return notes


def _ask(cluster: ClusterConfig, workload: dict[str, Any]) -> Findings:
    """Query the cluster with several kubectl commands at once."""
    checks: list[Callable[[ClusterConfig], Findings]] = [
        namespace_problems,
        permission_problems,
        _quota_problems,
        _account_problems,
    ]
    checks += [lambda cluster: _server_problems(cluster, workload)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        claims = [pool.submit(_claim_problems, cluster, name) for name in cluster.k8s.volumes]
        runs = [pool.submit(check, cluster) for check in checks]
        queue = [pool.submit(_queue_problems, cluster)] if cluster.k8s.queue else []
        problems: list[str] = []
        notes: list[str] = []
        for future in [*runs[:2], *claims, *queue, *runs[2:]]:
            try:
                found = future.result()
            except Unreachable as error:
                return error.problems, []
            except ConfigError as error:
                found = error.problems, []
            problems, notes = problems + found[0], notes + found[1]
    if len(problems) > 1 and (missing := [problem for problem in problems if "no such namespace" in problem]):
        return missing, notes  # its objects do not exist either
    return list(dict.fromkeys(problems)), notes


def namespace_problems(cluster: ClusterConfig) -> Findings:
    k8s = cluster.k8s
    answer = get(k8s.context, f"/api/v1/namespaces/{k8s.namespace}")
    if answer.reason == "NotFound":
        return [
            f"cluster.k8s.namespace={k8s.namespace}: no such namespace; `kubectl get namespaces` lists them, or ask "
            "your administrators"
        ], []
    return [], []  # many users may not read namespaces: then the other checks decide


def permission_problems(cluster: ClusterConfig) -> Findings:
    """Check that this user may create, query and delete the job, as `kubectl auth can-i` does."""
    k8s = cluster.k8s
    group, resource = ("batch", "jobs") if k8s.workload == Workload.job else ("jobset.x-k8s.io", "jobsets")
    needed = [(verb, group, resource) for verb in ("create", "get", "delete")]
    needed += [("create", "", "services")] if k8s.workload == Workload.job else []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda each: may(k8s.context, k8s.namespace, *each), needed)
    missing = [
        f"{verb} {resource}" for (verb, _, resource), allowed in zip(needed, answers, strict=True) if not allowed
    ]
    if not missing:
        return [], []
    return [
        f"cluster.k8s.namespace={k8s.namespace}: you may not {', '.join(missing)} there (kubectl auth can-i "
        f"{missing[0]}); choose another namespace or context (cluster.k8s.context), or ask your administrators"
    ], []


def _no_jobsets(workload: Workload) -> str:
    return f"cluster.k8s.workload={workload}: the cluster has no such resource; install its controller, or set job"


def _claim_problems(cluster: ClusterConfig, name: str) -> Findings:
    k8s = cluster.k8s
    answer = get(k8s.context, f"/api/v1/namespaces/{k8s.namespace}/persistentvolumeclaims/{name}")
    key = f"cluster.k8s.volumes.{name}"
    if answer.reason == "NotFound":
        return [
            f"{key}: there is no persistent volume claim {name} in the namespace {k8s.namespace}; `kubectl -n "
            f"{k8s.namespace} get persistentvolumeclaims` lists them"
        ], []
    if answer.status:
        return [], [f"{key}: the claim could not be checked: {answer.message}"]
    claim = answer.json()
    phase = (claim.get("status") or {}).get("phase")
    modes = (claim.get("spec") or {}).get("accessModes") or []
    if phase == "Lost":
        return [f"{key}: the claim has lost its volume (phase Lost); use another claim"], []
    if (
        cluster.most_nodes > 1
        and modes
        and not set(modes) & set(_SHARED_MODES)
        and k8s.volumes[name] == _run_mount(cluster)
    ):
        return [
            f"{key}: the claim has access mode {', '.join(modes)}, but {cluster.nodes} pods on different nodes write "
            "to it; use a claim with ReadWriteMany, or set cluster.nodes=1"
        ], []
    return [], [f"{key}: the claim is {phase}, not yet bound to a volume"] if phase == "Pending" else []


def _run_mount(cluster: ClusterConfig) -> str | None:
    """Return the mount path of the volume with the working directory, else of the first one."""
    return mounted_at(cluster, Path.cwd()) or next(iter(cluster.k8s.volumes.values()), None)


def _queue_problems(cluster: ClusterConfig) -> Findings:
    k8s = cluster.k8s
    path = f"/apis/kueue.x-k8s.io/v1beta1/namespaces/{k8s.namespace}/localqueues"
    answer = get(k8s.context, path)
    if answer.reason == "NotFound" or "could not find the requested resource" in answer.errors:
        return [
            f"cluster.k8s.queue={k8s.queue}: the cluster does not serve Kueue's queues (kueue.x-k8s.io/v1beta1), so "
            "that the job would stay suspended; set cluster.k8s.queue=null"
        ], []
    if answer.status:
        return [], [f"cluster.k8s.queue={k8s.queue}: could not be checked: {answer.message}"]
    names = sorted(each["metadata"]["name"] for each in answer.json().get("items") or ())
    if k8s.queue in names:
        return [], []
    listed = f"it has {', '.join(names)}" if names else "it has none"
    return [f"cluster.k8s.queue={k8s.queue}: no such LocalQueue in the namespace {k8s.namespace}; {listed}"], []


def _account_problems(cluster: ClusterConfig) -> Findings:
    """Check that the service account and the secrets exist, as far as this user may read them."""
    k8s, problems = cluster.k8s, []
    named = [("service_account", "serviceaccounts", k8s.service_account)] if k8s.service_account else []
    named += [("secrets", "secrets", name) for name in k8s.secrets]
    named += [("image_pull_secrets", "secrets", name) for name in k8s.image_pull_secrets]
    for key, resource, name in named:
        answer = get(k8s.context, f"/api/v1/namespaces/{k8s.namespace}/{resource}/{name}")
        if answer.reason == "NotFound":
            problems.append(
                f"cluster.k8s.{key}: there is no {resource.removesuffix('s')} {name} in the namespace {k8s.namespace}; "
                "create it, or remove it from the config"
            )
    return problems, []


def _quota_problems(cluster: ClusterConfig) -> Findings:
    """Compare the pods' resources with the namespace's quotas."""
    k8s = cluster.k8s
    answer = get(k8s.context, f"/api/v1/namespaces/{k8s.namespace}/resourcequotas")
    if answer.status:
        return [], []  # many users may not read quotas
    problems, notes = [], []
    for quota in answer.json().get("items") or ():
        limits, used = (quota.get("status") or {}).get("hard") or {}, (quota.get("status") or {}).get("used") or {}
        for name, need in _needed(cluster).items():
            for key in (name, f"requests.{name}", f"limits.{name}"):
                if key not in limits:
                    continue
                limit, taken = amount(limits[key]), amount(used.get(key, "0"))
                what = (
                    f"{_key_of(cluster, name)}: the job needs {need:g} {key}, but the quota {quota['metadata']['name']}"
                )
                if need > limit:
                    problems.append(
                        f"{what} of the namespace {k8s.namespace} allows {limit:g}; lower it, or cluster.nodes"
                    )
                elif need > limit - taken:
                    notes.append(
                        f"{what} has {max(limit - taken, 0):g} of {limit:g} left: the job waits for the others"
                    )
    return list(dict.fromkeys(problems)), list(dict.fromkeys(notes))


def _needed(cluster: ClusterConfig) -> dict[str, float]:
    """Return the resources of all pods together."""
    needed = {name: amount(each) * cluster.most_nodes for name, each in pod_resources(cluster).items()}
    return needed | {"pods": float(cluster.most_nodes)}


def _key_of(cluster: ClusterConfig, resource: str) -> str:
    """Return the key and value of the config that request a resource."""
    if resource == "pods":
        return f"cluster.nodes={cluster.nodes}"
    if resource == cluster.k8s.gpu_resource:
        return f"cluster.procs_per_node={cluster.procs_per_node}"
    if resource in cluster.k8s.resources:
        return f"cluster.k8s.resources.{resource}={cluster.k8s.resources[resource]}"
    return f"cluster.cpus_per_proc={cluster.cpus_per_proc}"


def amount(quantity: str) -> float:
    """Return a Kubernetes quantity, such as 64Gi, 500M or 250m, as a number."""
    suffix = next(each for each in sorted(_SUFFIXES, key=len, reverse=True) if quantity.endswith(each))
    return float(quantity.removesuffix(suffix)) * _SUFFIXES[suffix]


def _server_problems(cluster: ClusterConfig, workload: dict[str, Any]) -> Findings:
    """Have the server check the job without storing it: its fields, and the cluster's admission rules."""
    answer = create(cluster.k8s.context, cluster.k8s.namespace, workload, dry_run=True)
    if answer.status == 0 or (answer.reason == "Forbidden" and "cannot create resource" in answer.errors):
        return [], []  # the latter is reported by the check of permissions
    if answer.reason == "NotFound" and "namespaces" not in answer.errors:
        return [_no_jobsets(cluster.k8s.workload)], []
    return [refusal(answer, cluster)], []


def refusal(answer: Answer, cluster: ClusterConfig) -> str:
    """Return the server's refusal of a manifest as one sentence, with the keys to change."""
    keys = "cluster.template" if cluster.template else "the keys of cluster.k8s that it names"
    return f"cluster.kind=k8s: the cluster rejects the job: {answer.message}; change {keys}"
