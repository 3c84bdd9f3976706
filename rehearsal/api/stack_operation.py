"""The life of a stack: one thread creates, updates, rolls back or deletes its resources in order.

As CloudFormation does: what does not depend on each other goes on side by side, a resource that waits for
signals holds up only those that depend on it, a failure rolls everything back, and every step is an event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from graphlib import TopologicalSorter
from typing import Any

from rehearsal.api import groups, rolling
from rehearsal.api.resources import StackResources
from rehearsal.api.signals import SignalBook, reason_on_console
from rehearsal.api.stack_record import (
    Cancelled,
    ResourceFailed,
    ResourceState,
    failed_to,
    physical_id,
    record_of,
    words,
)
from rehearsal.api.template import RollingUpdatePolicy, SignalPolicy, creation_order, kept_on_delete, sorter
from rehearsal.api.world import World

log = logging.getLogger("rehearsal.api.stacks")
GROUP = "AWS::AutoScaling::AutoScalingGroup"
_POLL_S = 0.1
_DELETE_PASSES = 4
_GROUP_GONE_S = 600.0

Job = Iterator[None]


class StackOperation:
    """One operation on one stack, in a thread of its own."""

    def __init__(self, world: World, stack: Any) -> None:
        self.world = world
        self.stack = stack
        self.record = record_of(stack)
        self.map: StackResources = stack.resource_map
        self.cancelled = threading.Event()
        self._previous = self.record.operation
        self._thread: threading.Thread | None = None
        self.record.operation = self

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread; an operation that is under way is cancelled and waited for first."""

        def run() -> None:
            try:
                if self._previous is not None:
                    self._previous.cancel()
                work()
            except Cancelled:
                log.info("operation on stack %s was cancelled", self.stack.name)
            except Exception as error:
                log.exception("operation on stack %s broke", self.stack.name)
                verb = str(self.stack.status).removesuffix("_IN_PROGRESS")
                self.status(f"{verb}_FAILED", f"the rehearsal itself failed: {words(error)}")

        self._thread = threading.Thread(target=run, name=f"stack-{self.stack.name}", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Ask the operation to stop, and wait until it has."""
        self.cancelled.set()
        if self._thread is not None:
            self._thread.join()

    # -- what the stack says of itself

    def status(self, status: str, reason: str = "") -> None:
        """Set the stack's status and tell it."""
        with self.world.lock:
            self.stack.status = status
            self.stack.stack_status_reason = reason or None
            self.stack.last_updated_time = datetime.now(UTC)
            self.stack._add_stack_event(status, resource_status_reason=reason or None)
        self.world.events.add(
            "stack.status",
            f"{self.stack.name} {status}" + (f": {reason}" if reason else ""),
            stack=self.stack.name,
            status=status,
            reason=reason,
        )

    def note(self, name: str, status: str, reason: str = "") -> None:
        """Set a resource's status and tell it; called under the lock."""
        from moto.cloudformation.models import Event

        kind = self._definition(name)["Type"]
        resource = self.map.resource(name)
        known = self.record.resources.get(name)
        physical = physical_id(resource, self.stack.name, name) if resource else ""
        physical = physical or (known.physical_id if known else "")
        self.record.resources[name] = ResourceState(kind, physical, status, reason, datetime.now(UTC))
        self.stack.events.append(
            Event(
                stack_id=self.stack.stack_id,
                stack_name=self.stack.name,
                logical_resource_id=name,
                physical_resource_id=physical,
                resource_type=kind,
                resource_status=status,
                resource_status_reason=reason or None,
                resource_properties=None,
            )
        )
        self.world.events.add(
            "resource.status",
            f"{self.stack.name} {name} {status}" + (f": {reason}" if reason else ""),
            stack=self.stack.name,
            resource=name,
            type=kind,
            status=status,
            reason=reason,
        )

    def _definition(self, name: str) -> dict[str, Any]:
        definition: dict[str, Any] = self.map._resource_json_map.get(name) or self.record.applied[name]
        return definition

    # -- running jobs

    def run_jobs(self, order: TopologicalSorter[str], job: Callable[[str], Job]) -> None:
        """Run a job for each name as soon as those that it depends on are done.

        Raises:
            ResourceFailed: the first failure; jobs under way are told cancelled.
            Cancelled: another operation takes over.
        """
        running: dict[str, Job] = {}
        while order.is_active():
            for name in order.get_ready():
                running[name] = job(name)
            progressed = False
            for name, work in list(running.items()):
                if self.cancelled.is_set():
                    raise Cancelled
                with self.world.lock:
                    try:
                        next(work)
                    except StopIteration:
                        del running[name]
                        order.done(name)
                        progressed = True
                    except ResourceFailed:
                        for other in running:
                            if other != name:
                                self._note_cancelled(other)
                        raise
            if not progressed:
                self.cancelled.wait(_POLL_S)

    def _note_cancelled(self, name: str) -> None:
        state = self.record.resources.get(name)
        if state and state.status.endswith("IN_PROGRESS"):
            verb = state.status.split("_")[0]
            self.note(name, f"{verb}_FAILED", f"Resource {verb.lower()} cancelled")

    # -- create

    def create(self, disable_rollback: bool = False) -> None:
        """Create all, or roll back."""
        self.status("CREATE_IN_PROGRESS", "User Initiated")
        try:
            self.run_jobs(sorter(self.map._resource_json_map), self._create_job)
        except (ResourceFailed, ValueError) as failure:
            reason = failed_to("create", failure)
            if disable_rollback:
                self.status("CREATE_FAILED", reason)
                return
            self.status("ROLLBACK_IN_PROGRESS", f"{reason} Rollback requested by user.")
            left = self.delete_all(rollback_of_create=True)
            self.status("ROLLBACK_FAILED" if left else "ROLLBACK_COMPLETE", left)
            return
        self.status("CREATE_COMPLETE")

    def _create_job(self, name: str) -> Job:
        if not self.map.holds(name):
            return
        self.note(name, "CREATE_IN_PROGRESS")
        yield
        try:
            definition = self.map.resolved(name)
            policy = SignalPolicy.of(definition)
            if policy:
                self.record.signals[name] = SignalBook()
            self.map.create_one(self.world, name, self.stack.name)
            self.record.applied[name] = definition
            self.note(name, "CREATE_IN_PROGRESS", "Resource creation Initiated")
            if policy:
                yield from self._await_signals(name, policy)
        except ResourceFailed as failure:
            self.note(name, "CREATE_FAILED", failure.reason)
            raise
        except Exception as error:
            log.exception("creating %s of %s", name, self.stack.name)
            self.note(name, "CREATE_FAILED", words(error))
            raise ResourceFailed(name, words(error)) from error
        finally:
            self.record.signals.pop(name, None)
        self.note(name, "CREATE_COMPLETE")

    def _await_signals(self, name: str, policy: SignalPolicy) -> Job:
        book = self.record.signals[name]
        deadline = time.monotonic() + policy.timeout_s
        while len(book.successes) < policy.count:
            if book.failures:
                raise ResourceFailed(name, self.failure_signals(book))
            if time.monotonic() > deadline:
                missing = policy.count - len(book.successes)
                raise ResourceFailed(
                    name, f"Failed to receive {missing} resource signal(s) within the specified duration"
                )
            yield

    def failure_signals(self, book: SignalBook) -> str:
        """CloudFormation's words for FAILURE signals, with what each host said on its console."""
        parts = []
        for host in sorted(book.failures):
            reason = reason_on_console(self.world.console(host))
            parts.append(f"Received FAILURE signal with UniqueId {host}" + (f" ({reason})" if reason else ""))
        return "; ".join(parts)

    # -- update

    def update(
        self, template: dict[str, Any], parameters: dict[str, Any], finish: Callable[[], None]
    ) -> None:
        """Bring the stack to another template and parameters, or back; ``finish`` runs when it got there."""
        old = (self.map._template, dict(self.map.input_parameters))
        self.status("UPDATE_IN_PROGRESS", "User Initiated")
        before = set(self.record.applied)
        touched: set[str] = set()
        try:
            with self.world.lock:
                self.map.retarget(template, parameters)
            self.run_jobs(sorter(self.map._resource_json_map), lambda name: self._update_job(name, touched))
        except (ResourceFailed, ValueError) as failure:
            self.status("UPDATE_ROLLBACK_IN_PROGRESS", failed_to("update", failure))
            self._roll_back_update(*old, before, touched)
            return
        with self.world.lock:
            finish()
            removed = [
                n for n in self.record.applied if n not in template["Resources"] or not self.map.holds(n)
            ]
        self.status("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS")
        self.delete_some(removed, rollback_of_create=False)
        self.status("UPDATE_COMPLETE")

    def _roll_back_update(
        self, template: dict[str, Any], parameters: dict[str, Any], before: set[str], touched: set[str]
    ) -> None:
        try:
            with self.world.lock:
                self.map.retarget(template, parameters)
            again: set[str] = set()
            self.run_jobs(
                sorter(self.map._resource_json_map), lambda name: self._update_job(name, again, force=touched)
            )
        except (ResourceFailed, ValueError) as failure:
            self.status("UPDATE_ROLLBACK_FAILED", failed_to("update", failure))
            return
        self.status("UPDATE_ROLLBACK_COMPLETE_CLEANUP_IN_PROGRESS")
        self.delete_some([n for n in self.record.applied if n not in before], rollback_of_create=True)
        self.status("UPDATE_ROLLBACK_COMPLETE")

    def _update_job(self, name: str, touched: set[str], force: set[str] | None = None) -> Job:
        if not self.map.holds(name):
            return
        if self.map.resource(name) is None:
            yield from self._create_job(name)
            return
        definition = self.map.resolved(name)
        old = self.record.applied[name]
        if definition == old and name not in (force or ()):
            return
        touched.add(name)
        if definition["Properties"] == old["Properties"] and name not in (force or ()):
            self.record.applied[name] = definition  # a policy or metadata: nothing to do in the resource
            return
        self.note(name, "UPDATE_IN_PROGRESS")
        yield
        try:
            if definition["Type"] == GROUP:
                yield from self._update_group(name, definition)
                remark = ""
            else:
                remark = self.map.update_one(self.world, name, self.stack.name)
            self.record.applied[name] = definition
        except ResourceFailed as failure:
            self.note(name, "UPDATE_FAILED", failure.reason)
            raise
        except Exception as error:
            log.exception("updating %s of %s", name, self.stack.name)
            self.note(name, "UPDATE_FAILED", words(error))
            raise ResourceFailed(name, words(error)) from error
        finally:
            self.record.signals.pop(name, None)
        self.note(name, "UPDATE_COMPLETE", remark)

    def _update_group(self, name: str, definition: dict[str, Any]) -> Job:
        group = self.map.resource(name)
        policy = RollingUpdatePolicy.of(definition)
        groups.reconfigure(self.world, group, definition["Properties"], rolling=policy is not None)
        if policy is None:
            return
        book = self.record.signals[name] = SignalBook()
        roll = rolling.RollingUpdate(self.world, group, policy, book, lambda: self.failure_signals(book))
        try:
            for remark in roll.run():
                if remark:
                    self.note(name, "UPDATE_IN_PROGRESS", remark)
                yield
        except rolling.RollingUpdateFailed as failure:
            raise ResourceFailed(name, str(failure)) from failure

    # -- delete

    def delete(self, finish: Callable[[], None]) -> None:
        """Delete all; ``finish`` runs when nothing is left."""
        self.status("DELETE_IN_PROGRESS", "User Initiated")
        left = self.delete_all(rollback_of_create=False)
        if left:
            self.status("DELETE_FAILED", left)
            return
        self.status("DELETE_COMPLETE")
        with self.world.lock:
            finish()

    def delete_all(self, *, rollback_of_create: bool) -> str:
        """Delete every resource that exists; returns the reason when some could not be."""
        names = [name for name in self.map.names() if self.map.resource(name) is not None]
        return self.delete_some(names, rollback_of_create=rollback_of_create)

    def delete_some(self, names: list[str], *, rollback_of_create: bool) -> str:
        """Delete resources, dependents first; returns the reason when some could not be."""
        definitions = {name: self.record.applied.get(name) or self._definition(name) for name in names}
        raw = {name: self.map._resource_json_map.get(name) or definitions[name] for name in names}
        order = [name for name in reversed(creation_order(raw)) if name in definitions]
        failed: dict[str, str] = {}
        for _ in range(_DELETE_PASSES):
            failed = {}
            for name in order:
                if self.map.resource(name) is None:
                    continue
                reason = self._delete_one(name, definitions[name], rollback_of_create)
                if reason:
                    failed[name] = reason
            if not failed:
                return ""
        for name, reason in failed.items():
            with self.world.lock:
                self.note(name, "DELETE_FAILED", reason)
        return f"The following resource(s) failed to delete: [{', '.join(failed)}]. "

    def _delete_one(self, name: str, definition: dict[str, Any], rollback_of_create: bool) -> str:
        with self.world.lock:
            if kept_on_delete(definition, rollback_of_create=rollback_of_create):
                self.note(name, "DELETE_SKIPPED")
                self.map._parsed_resources.pop(name, None)
                self.record.applied.pop(name, None)
                return ""
            state = self.record.resources.get(name)
            if state is None or state.status != "DELETE_IN_PROGRESS":
                self.note(name, "DELETE_IN_PROGRESS")
            group = self.map.resource(name) if definition["Type"] == GROUP else None
            if group is not None:
                groups.empty(self.world, group)
        if group is not None and not self._wait_empty(group):
            return f"instances of {group.name} did not terminate within {_GROUP_GONE_S:.0f} s"
        with self.world.lock:
            try:
                self.map.delete_one(self.world, name, definition)
            except Exception as error:
                log.debug("deleting %s of %s", name, self.stack.name, exc_info=True)
                return words(error)
            self.record.applied.setdefault(name, definition)
            self.note(name, "DELETE_COMPLETE")
            self.record.applied.pop(name, None)
        return ""

    def _wait_empty(self, group: Any) -> bool:
        deadline = time.monotonic() + _GROUP_GONE_S
        while group.instance_states:
            if self.cancelled.wait(_POLL_S):
                raise Cancelled
            if time.monotonic() > deadline:
                return False
        return True
