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

-- A job stands in exactly one of these three, so each stays as small as what it is for: handing
-- out, finding lost leases, and paging or pruning what has ended.
create index job_waiting on job (queue, priority, due_ms) where state = 'waiting';
create index job_running on job (queue, lease_until_ms) where state = 'running';
create index job_ended on job (state, queue, ended_ms) where ended_ms is not null;
create index job_asked on job (worker) where asked = 1;

-- Counts are kept by triggers and not by the store's code, so that they stay right whoever writes.
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

alter table job add column started_ms integer;  -- as far as the holder has told

-- How far the wall clock was from the monotonic one when somebody last looked, and of which start of
-- which machine that is true. Where it has changed, the clock was set, and the leases move along.
create table clock (
    machine text    not null,
    wall_ns integer not null
) strict;
