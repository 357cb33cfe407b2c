-- The embedded store's schema. Change it only by a further numbered part at the end: a part runs
-- once, when `pragma user_version` is lower than its number, and files in use are never rewritten
-- by hand.

-- part 1

create table job (
    n              integer primary key,
    id             text    not null unique,
    task           text    not null,
    payload        text    not null,           -- the arguments, JSON
    queue          text    not null,
    priority       integer not null,
    due_ms         integer not null,
    created_ms     integer not null,
    retries        integer,
    timeout_ms     integer,
    state          text    not null default 'waiting',
    attempt        integer not null default 0,
    fence          integer not null default 0,
    failures       integer not null default 0,
    takeovers      integer not null default 0,
    worker         text,
    lease_until_ms integer,
    asked          integer not null default 0,
    settled        integer,
    ended_ms       integer,
    error          text,
    result         text,
    history        text    not null default '[]'
) strict;

-- A job is in exactly one of these three, so each stays small: for claiming, for finding leases that
-- have run out, and for paging through and pruning ended jobs.
create index job_waiting on job (queue, priority, due_ms) where state = 'waiting';
create index job_running on job (queue, lease_until_ms) where state = 'running';
create index job_ended on job (state, queue, ended_ms) where ended_ms is not null;
create index job_asked on job (worker) where asked = 1;

-- Counts are kept by triggers and not by the store's code, so that they are right whoever writes.
create table tally (
    queue text    not null,
    state text    not null,
    jobs  integer not null,
    primary key (queue, state)
) strict, without rowid;

create trigger job_added after insert on job begin
    insert into tally values (new.queue, new.state, 1)
        on conflict do update set jobs = jobs + 1;
end;

create trigger job_moved after update of state on job when old.state <> new.state begin
    update tally set jobs = jobs - 1 where queue = old.queue and state = old.state;
    insert into tally values (new.queue, new.state, 1)
        on conflict do update set jobs = jobs + 1;
end;

create trigger job_forgotten after delete on job begin
    update tally set jobs = jobs - 1 where queue = old.queue and state = old.state;
end;

create table paused (queue text primary key) strict, without rowid;

create table schedule (
    name    text    primary key,
    rule    text    not null,
    next_ms integer,
    paused  integer not null,
    last_id text,
    fence   integer not null
) strict, without rowid;

create table worker (
    name    text    primary key,
    info    text    not null,
    gone_ms integer not null
) strict, without rowid;

create table bucket (
    key        text    primary key,
    full_at_ns integer not null
) strict, without rowid;

-- part 2

alter table job add column started_ms integer;  -- once the holder has told the store

-- The distance of the wall clock from the monotonic clock when they were last read, and the boot of
-- the machine that it belongs to. If it has changed, the clock was set, and leases move with it.
create table clock (
    machine text    not null,
    wall_ns integer not null
) strict;

-- part 3

alter table job add column traceback text;

-- A parked job has a state of its own here, so that no claim meets it in the index of waiting ones.
-- This index finds the tasks that have parked jobs, and the jobs of one task.
create index job_parked on job (queue, task, priority, due_ms) where state = 'parked';

-- part 4

alter table job add column expires_ms integer;
alter table job add column meta text;      -- JSON, as is the next
alter table job add column progress text;  -- of the last run, once the holder has told the store

-- Finds jobs by their meta. Kept by triggers, whoever writes; a job without meta has no rows here.
create table job_meta (
    name  text    not null,
    value text    not null,
    n     integer not null,
    primary key (name, value, n)
) strict, without rowid;

create trigger job_meta_added after insert on job when new.meta is not null begin
    insert into job_meta select key, value, new.n from json_each(new.meta);
end;

create trigger job_meta_forgotten after delete on job when old.meta is not null begin
    delete from job_meta
    where n = old.n and (name, value) in (select key, value from json_each(old.meta));
end;

-- part 5

-- Small named texts, such as API keys. The file may be the user's own, with a table `record`.
create table tickwheel_record (
    kind text not null,
    name text not null,
    body text not null,
    primary key (kind, name)
) strict, without rowid;

-- part 6

-- What others have asked of a job since it was added: JSON. `told` says that its holder is to put it
-- back, unless it has started.
alter table job add column changes text;
alter table job add column told integer not null default 0;

create index job_told on job (worker) where told = 1;

create trigger job_requeued after update of queue on job
when old.queue <> new.queue and old.state = new.state begin
    update tally set jobs = jobs - 1 where queue = old.queue and state = old.state;
    insert into tally values (new.queue, new.state, 1)
        on conflict do update set jobs = jobs + 1;
end;

-- Another program may have written anything as meta.
create trigger job_meta_changed after update of meta on job when old.meta is not new.meta begin
    delete from job_meta
    where n = old.n and (name, value) in (
        select key, value from json_each(iif(json_valid(old.meta), old.meta, '{}')));
    insert into job_meta
        select key, value, new.n from json_each(iif(json_valid(new.meta), new.meta, '{}'))
        where key is not null and type = 'text';
end;
