-- Tickwheel on Redis: each step of a job's life is one call of this script, so it is atomic.
-- ARGV[1] names the step, ARGV[2] has its arguments (msgpack). KEYS are all keys that the step may
-- touch (keys.py); the first is the hash `job`.
--
-- All keys begin with tw:{namespace}: and so are in one slot of a cluster.
--
--   job               hash  id → "<state><rank> <settled> <length> <queue><JSON>": the job as it was
--                           added or last settled; <settled> is the fence of that settlement, or -
--   since             hash  id → the steps since then, one line each, the latest first:
--                             r <fence> <lease end> <flag> <worker>   claimed, maybe extended; the flag
--                               is 1 if it was asked to stop, and 2 more if others have changed its
--                               record since (an older release then takes the claim for lost); once
--                               the worker has reported when it started the job, that time comes
--                               before its name, which begins with a quote; a 0 before the time says
--                               that there is progress
--                             c <now>                                  cancelled
--                             w <now>                                  put back by a rerun
--                           "\n<id>" → the progress of the last run (JSON), until it is settled. An
--                           older release doesn't know it, and reads the lines as ever
--   meta              hash  id → the meta of the job, a line for each name and each value; only of jobs
--                           that have some
--   tags              zset  "<name>\n<value>\n<id>" of these jobs, in this order: all scores are 0
--   w:<rank>:<queue>  zset  ids of waiting jobs, by due time; not of those that are parked
--   w:p:<queue>       zset  "<task>\n<3 - rank><due time><id>" of parked jobs, in this order: all
--                           scores are 0, and the due time has 16 digits
--   parked            hash  queue → "<digest>", and for each task with parked jobs a line
--                           "<task> <time>": when one was last parked, give or take FRESH. A task
--                           stays for FORGET after that, so that the digest of the tasks changes rarely
--   r:<rank>:<queue>  zset  ids of running jobs, by the end of their lease
--   e:<state>:<queue> zset  ids of ended jobs, by the time they ended
--   names             zset  queues that have jobs or are paused, by name: all scores are 0
--   paused            set   queues that are paused
--   asked             zset  "<worker>\n<id>" of running jobs that were asked to stop: all scores are 0
--   told              zset  the same of those that are to be put back unless they have started
--   sleep             hash  queue → a job that is due before this time wakes somebody who waits
--   schedule          hash  name → "<fence> <JSON>"
--   record:<kind>     hash  name → text: small named texts, such as API keys
--   records:<kind>    zset  the names of these: all scores are 0
--   worker            hash  name → JSON
--   gone              zset  names of workers, by the time from which they count as gone
--   bucket:<key>      text  when a bucket is full again: "<milliseconds> <nanoseconds>"
--   schema            text  the version of this layout
--   watched           text  exists while somebody waits for the end of jobs, and a little longer
--   none              never exists, see below
--   wake              channel: "q<queue>" there may be work, "p<queue>\n<task>" a job was parked,
--                           "a<worker>" a job was asked to stop
--   ends              channel: the ids of jobs that ended together (msgpack), "" if they are too many
--
-- States: w waiting, r running, d done, x dead, c cancelled. Ranks: 0 to 3, as priorities. A worker,
-- a task and what is in a meta are JSON here, so they have no line break. job.py defines what a step means for a job:
-- this script only moves jobs between sets and adds lines to `since`, which readers apply.
--
-- A worker may know a thousand tasks, so it doesn't send them with each claim. It keeps the tasks in
-- `parked` and sends, for each queue, their digest and those that it knows. If the digest is no longer
-- right, it gets the tasks and asks again.
--
-- Redis does not undo what a script did before an error. So nothing may fail after the first write:
--
-- - A node that can't write, or whose memory is full, refuses only the first write of a script. Each
--   step reads, decides, and then writes. `add` and `fire` begin with a write that needs memory, so
--   they are refused as a whole. The other steps have to work on a full server: they begin with a
--   write that needs no memory (DEL), and Redis then allows the rest.
-- - While a slot is being moved, each of the two nodes has some of its keys, and a script would fail
--   at the first key that is missing. A node that lacks one of the keys in KEYS doesn't start the
--   script (ASK, TRYAGAIN). `none` is always in KEYS and exists on no node, so no step runs during a
--   move, not even one whose other keys are all still there.

if redis.replicate_commands then redis.replicate_commands() end

local ROOT = KEYS[1]:sub(1, -4)
local JOB, SINCE, NAMES, PAUSED = KEYS[1], ROOT .. 'since', ROOT .. 'names', ROOT .. 'paused'
local SLEEP, SCHEDULE, WAKE = ROOT .. 'sleep', ROOT .. 'schedule', ROOT .. 'wake'
local WORKER, GONE, ASKED, NONE = ROOT .. 'worker', ROOT .. 'gone', ROOT .. 'asked', ROOT .. 'none'
local PARKED, META, TAGS = ROOT .. 'parked', ROOT .. 'meta', ROOT .. 'tags'
local WATCHED, ENDS = ROOT .. 'watched', ROOT .. 'ends'
-- How many values one command is given; Lua's unpack can't take more than 8,000.
local MANY = 2000
-- How many records are read at a time and at first, and how many bytes one step reads: jobs can be
-- large.
local FEW, FIRST, BYTES = 100, 10, 16 * 1024 * 1024
local ENDED = {'d', 'x', 'c'}
-- A message with the ids of ended jobs has at most so many bytes.
local NEWS = 64 * 1024

local call = redis.call

-- --- Helpers

local function text(number) return string.format('%.0f', number) end

-- Append one or two values to the list for this key. The list keeps its own count, because taking
-- its length each time would cost more than everything else here.
local function put(lists, key, one, two)
  local list = lists[key]
  if not list then
    list = {n = 0}
    lists[key] = list
  end
  local n = list.n + 1
  list[n] = one
  if two then
    n = n + 1
    list[n] = two
  end
  list.n = n
end

-- Call the command for each key with the values of its list, MANY at a time.
local function write(command, lists)
  for key, list in pairs(lists) do
    for first = 1, list.n, MANY do
      call(command, key, unpack(list, first, math.min(first + MANY - 1, list.n)))
    end
  end
end

-- The values of these fields; false for fields that don't exist.
local function values(key, fields)
  local found = {}
  for first = 1, #fields, MANY do
    local some = call('HMGET', key, unpack(fields, first, math.min(first + MANY - 1, #fields)))
    for i = 1, #some do found[first + i - 1] = some[i] end
  end
  return found
end

-- How many records to read next, after `count` records of `bytes` in total: about as many as still
-- fit if they are as large.
local function next_few(count, bytes)
  if count == 0 then return FIRST end
  return math.max(1, math.min(FEW, math.floor((BYTES - bytes) * count / (bytes + 1))))
end

-- The records of the first ids: as many as one step may read, but at least one.
local function records_of(ids)
  local found, bytes = {}, 0
  local first = 1
  while first <= #ids do
    local last = math.min(first + next_few(#found, bytes) - 1, #ids)
    local some = call('HMGET', JOB, unpack(ids, first, last))
    for i = 1, #some do
      bytes = bytes + (some[i] and #some[i] or 0)
      if bytes > BYTES and #found > 0 then return found end
      found[#found + 1] = some[i]
    end
    first = last + 1
  end
  return found
end

-- Whether one string comes before another in Redis's order: by bytes, whatever the locale.
local function before(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = a:byte(i), b:byte(i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- --- Sets and places

-- A function from a place to the key of its set. It caches, because a batch needs few keys often.
local function keys(kind)
  local made = {}
  return function(place)
    local key = made[place]
    if not key then
      key = ROOT .. kind .. place
      made[place] = key
    end
    return key
  end
end

local waiting, running = keys('w:'), keys('r:')
local end_of = {d = keys('e:d:'), x = keys('e:x:'), c = keys('e:c:')}
local function ended(state, queue) return end_of[state](queue) end

-- The set of jobs with this state and place ("<rank>:<queue>").
local function set_of(state, place)
  if state == 'w' then return waiting(place) end
  if state == 'r' then return running(place) end
  return ended(state, place:sub(3))
end

-- The last claim in these lines: fence, lease end, asked, worker, the lines after it, and when the
-- job was started ("" if that is unknown).
local function last_claim(lines)
  local fence, lease, asked, started, worker, rest =
    lines:match('^r (%d+) (%d+) ([0-3]) (%d*) ?("[^\n]*)(.*)$')
  return fence, lease, asked, worker, rest, started
end

local function claim_line(fence, lease, asked, worker, started)
  local told = started ~= '' and started .. ' ' or ''
  return 'r ' .. fence .. ' ' .. lease .. ' ' .. asked .. ' ' .. told .. worker
end

-- Where `since` has the progress of a job; whether a claim says so.
local function progress_field(id) return '\n' .. id end
local function has_progress(started) return started and started:find('^0%d') end

-- The lines of these jobs, for a reader: the progress of the last run comes first ("p <JSON>").
local function with_progress(ids, lines)
  local told, fields = {}, {}
  for i = 1, #ids do
    if lines[i] and lines[i]:find('^[cw %d\n]*r %d+ %d+ [0-3] 0%d') then
      told[#told + 1], fields[#fields + 1] = i, progress_field(ids[i])
    end
  end
  for i, progress in ipairs(values(SINCE, fields)) do
    if progress then lines[told[i]] = 'p ' .. progress .. '\n' .. lines[told[i]] end
  end
  return lines
end

-- The entry in `asked` for a job that its holder was asked to stop.
local function asked_member(worker, id) return worker .. '\n' .. id end

-- The place ("<rank>:<queue>") and the state in a record, and where its JSON begins; place '' if there
-- is no record.
local function place_of(record)
  if not record then return '' end
  local state, rank, size, at = record:match('^(%l)(%d) %S+ (%d+) ()')
  local json = at + tonumber(size)
  return rank .. ':' .. record:sub(at, json - 1), state, json
end

local function parked_set(queue) return waiting('p:' .. queue) end

-- The functions of parking.lua. They are made only if they are needed: making functions is a large
-- part of what a small step costs.
local made
local function parking()
  if not made then
    made = (function()
-- include parking.lua
    end)()
  end
  return made
end

-- State, place and lines of each job by id, nil if it is unknown; and for how many of the ids this
-- step may answer. Only so many records can be read; and a job that is no longer in the place that
-- the caller read (it was deleted and added again) has keys that are not in KEYS.
local function jobs_at(ids, places)
  local records, lines, found = records_of(ids), values(SINCE, ids), {}
  for i, record in ipairs(records) do
    local place, state = place_of(record)
    if place ~= places[i] then return found, i - 1 end
    if record then
      found[ids[i]] = {
        state = lines[i] and lines[i]:sub(1, 1) or state,
        place = place,
        queue = place:sub(3),
        lines = lines[i],
        parked = not lines[i] and parking().as(ids[i], record),
      }
    end
  end
  return found, #records
end

-- Notify waits on these queues that would sleep past the new job that is due first.
local function notify(soonest)
  for queue, due in pairs(soonest) do
    local latest = call('HGET', SLEEP, queue)
    if latest and due < tonumber(latest) then
      call('HDEL', SLEEP, queue)
      call('PUBLISH', WAKE, 'q' .. queue)
    end
  end
end

-- A list for the ids of jobs that end in this step; nil if nobody waits for that.
local function watched_ends() return call('EXISTS', WATCHED) == 1 and {} or nil end

local function tell_ends(ids)
  if ids and #ids > 0 then
    local packed = cmsgpack.pack(ids)
    call('PUBLISH', ENDS, #packed <= NEWS and packed or '')
  end
end

local function sooner(soonest, queue, due)
  if due < (soonest[queue] or math.huge) then soonest[queue] = due end
end

local function open_queues(queues)
  if call('SCARD', PAUSED) == 0 then return queues end
  local open = {}
  for _, queue in ipairs(queues) do
    if call('SISMEMBER', PAUSED, queue) == 0 then open[#open + 1] = queue end
  end
  return open
end

local function forget_if_empty(queues)
  for queue in pairs(queues) do
    local keys = {parked_set(queue)}
    for rank = 0, 3 do
      keys[#keys + 1] = waiting(rank .. ':' .. queue)
      keys[#keys + 1] = running(rank .. ':' .. queue)
    end
    for _, state in ipairs(ENDED) do keys[#keys + 1] = ended(state, queue) end
    if call('EXISTS', unpack(keys)) == 0 and call('SISMEMBER', PAUSED, queue) == 0 then
      call('ZREM', NAMES, queue)
      call('HDEL', PARKED, queue)
    end
  end
end

-- --- Tasks with parked jobs

-- The entries that the caller doesn't have, as {queue, entry, …}, '' if there is none; nil if it has
-- all. `known` has, by queue, {digest, tasks that the caller knows}.
local function changes(queues, entries, known)
  local found
  for i, queue in ipairs(queues) do
    local entry, old = entries[i], known[queue]
    if (entry and entry:match('^%x+') or nil) ~= (old and old[1]) then
      found = found or {}
      found[#found + 1], found[#found + 2] = queue, entry or ''
    end
  end
  return found
end

-- --- Adding

local step = {}

-- Each name with its value, in an entry of `meta`.
local function tags_in(meta) return meta:gmatch('[^\n]+\n[^\n]+') end

-- `metas` has the entries in `meta` by the number of the job; false if there are none.
function step.add(ids, records, places, dues, metas)
  local taken, answers = values(JOB, ids), {}
  local jobs, sets, names, soonest, seen, tags = {}, {}, {}, {}, {}, {}
  for i, id in ipairs(ids) do
    if taken[i] or seen[id] then
      answers[i] = '0'
    else
      seen[id], answers[i] = true, '1'
      put(jobs, JOB, id, records[i])
      put(sets, waiting(places[i]), dues[i], id)
      sooner(soonest, places[i]:sub(3), dues[i])
      if metas and metas[i] then
        put(jobs, META, id, metas[i])
        for pair in tags_in(metas[i]) do put(tags, TAGS, '0', pair .. '\n' .. id) end
      end
    end
  end
  write('HSET', jobs)
  write('ZADD', tags)
  write('ZADD', sets)
  for queue in pairs(soonest) do put(names, NAMES, '0', queue) end
  write('ZADD', names)
  notify(soonest)
  return table.concat(answers)
end

-- What is to be deleted with these jobs: fields of hashes, and members of sets.
local function untag(ids, forget, leave)
  if call('EXISTS', META) == 0 then return end
  for i, meta in ipairs(values(META, ids)) do
    if meta then
      put(forget, META, ids[i])
      for pair in tags_in(meta) do put(leave, TAGS, pair .. '\n' .. ids[i]) end
    end
  end
end

-- Whether nobody has changed, fired or deleted the schedule since it was read.
local function unchanged(name, fence)
  local stored = call('HGET', SCHEDULE, name)
  return stored and stored:match('^%d+') == fence
end

function step.fire(name, fence, schedule, ids, records, places, dues, metas)
  if not unchanged(name, fence) then return 0 end
  call('HSET', SCHEDULE, name, schedule)
  step.add(ids, records, places, dues, metas)
  return 1
end

-- --- Claiming

-- The claimable jobs of one rank, in the order in which they became claimable.
local function claimable(queues, rank, limit, now, ahead, parked)
  local found, sources = {}, 0
  local function take(key, place, upto, early, lost)
    local some = call('ZRANGEBYSCORE', key, '-inf', upto, 'WITHSCORES', 'LIMIT', 0, limit)
    if #some > 0 then sources = sources + 1 end
    for i = 1, #some, 2 do
      local since = tonumber(some[i + 1]) - early
      found[#found + 1] = {id = some[i], place = place, since = since, lost = lost, n = #found}
    end
  end
  for _, queue in ipairs(queues) do
    local place = rank .. ':' .. queue
    take(waiting(place), place, now + ahead, ahead, false)
    take(running(place), place, now, 0, true)
  end
  for _ = 1, parked and limit or 0 do
    local job = parking().take(parked, rank)
    if not job then break end
    job.since, job.n, sources = job.due - ahead, #found, 2
    found[#found + 1] = job
  end
  if sources > 1 then
    table.sort(found, function(a, b)
      return a.since < b.since or (a.since == b.since and a.n < b.n)
    end)
  end
  return found
end

local function pick(queues, limit, now, ahead, parked)
  local picked, ids = {}, {}
  for rank = 3, 0, -1 do
    if #picked == limit then break end
    for _, each in ipairs(claimable(queues, rank, limit - #picked, now, ahead, parked)) do
      if #picked == limit then break end
      picked[#picked + 1] = each
      ids[#ids + 1] = each.id
    end
  end
  return picked, ids
end

-- Returns the records of the claimed jobs, and for each its lines from before this claim; then the ids
-- of lost jobs that others have changed, which are left for the caller to decide; or false and the
-- changes, if there are any and the caller wants them first. `known` is false if it knows no tasks.
function step.claim(queues, known, changes_first, worker, fence, limit, now, ahead, lease)
  local entries = known and values(PARKED, queues) or {}
  local changed = changes_first and changes(queues, entries, known)
  if changed then return {false, changed} end
  local open = open_queues(queues)
  local park = known and next(known) and parking()
  local parked, empty
  if park then parked, empty = park.lines(open, known, limit, now + ahead) end
  local picked, ids = pick(open, limit, now, ahead, parked)
  local records, lines = records_of(ids), values(SINCE, ids)
  local taken, before_it, changed_ones = {}, {}, nil
  local forgotten = park and park.entries_without(empty, queues, entries, now)
  local since, enter, leave, clear, forget, over = {}, {}, {}, {}, {}, watched_ends()
  local line = claim_line(fence, text(now + lease), '0', worker, '')
  for i, record in ipairs(records) do
    local id, place, old = picked[i].id, picked[i].place, lines[i]
    local asked, holder, started, _
    if picked[i].lost and old then
      asked, holder, _, started = select(3, last_claim(old))
    elseif picked[i].member then
      put(leave, parked_set(place:sub(3)), picked[i].member)
      -- An older release, which doesn't know of parked jobs, may have cancelled it.
      record = not old and park.as(id, record) == picked[i].member and record
    elseif not picked[i].lost then
      put(leave, waiting(place), id)
    end
    if not record then
      -- Somebody deleted the record by hand. Drop the id, or it would block the others.
      if picked[i].lost then put(leave, running(place), id) end
    elseif asked == '2' or asked == '3' then
      changed_ones = changed_ones or {}
      changed_ones[#changed_ones + 1] = id
    elseif asked == '1' then
      put(since, SINCE, id, 'c ' .. text(now) .. '\n' .. old)
      put(enter, ended('c', place:sub(3)), text(now), id)
      put(leave, running(place), id)
      put(clear, ASKED, asked_member(holder, id))
      if over then over[#over + 1] = id end
    else
      if has_progress(started) then put(forget, SINCE, progress_field(id)) end
      put(since, SINCE, id, old and line .. '\n' .. old or line)
      put(enter, running(place), text(now + lease), id)
      taken[#taken + 1], before_it[#before_it + 1] = record, old
    end
  end
  write('HSET', since)
  write('ZADD', enter)
  write('ZREM', leave)
  write('ZREM', clear)
  write('HDEL', forget)
  if park then park.write_entries(forgotten) end
  tell_ends(over)
  return {taken, before_it, changed_ones}
end

-- The records of the jobs that the claim with this fence took, and their lines. It reads all running
-- jobs of these queues, which is fine because it is rare: only after a lost reply.
function step.claimed_by(queues, fence)
  local records, ids, since, line = {}, {}, {}, 'r ' .. fence .. ' '
  for _, queue in ipairs(queues) do
    for rank = 0, 3 do
      local all = call('ZRANGE', running(rank .. ':' .. queue), 0, -1)
      local lines, mine = values(SINCE, all), {}
      for i, id in ipairs(all) do
        if lines[i] and lines[i]:sub(1, #line) == line then
          mine[#mine + 1], ids[#ids + 1], since[#since + 1] = id, id, lines[i]
        end
      end
      for _, record in ipairs(values(JOB, mine)) do records[#records + 1] = record end
    end
  end
  return {records, with_progress(ids, since)}
end

-- When a claim of these queues may next find work; '' if never. The caller then waits, until `upto`
-- at the latest, so `sleep` notes from when on it need not be notified. Or the changes, as for a claim.
function step.next(queues, known, changes_first, now, upto, ahead)
  local changed = changes_first and changes(queues, values(PARKED, queues), known)
  if changed then return {false, changed} end
  local soonest = math.huge
  for _, queue in ipairs(open_queues(queues)) do
    for _, task in ipairs(known and known[queue] and known[queue][2] or {}) do
      if soonest <= now then break end
      soonest = math.min(soonest, parking().first(queue, task) - ahead)
    end
    for rank = 0, 3 do
      local place = rank .. ':' .. queue
      local due = call('ZRANGE', waiting(place), 0, 0, 'WITHSCORES')[2]
      local lease = call('ZRANGE', running(place), 0, 0, 'WITHSCORES')[2]
      if due then soonest = math.min(soonest, tonumber(due) - ahead) end
      if lease then soonest = math.min(soonest, tonumber(lease)) end
    end
  end
  if soonest > now and upto > now then
    local latest = math.min(soonest, upto) + ahead
    for _, queue in ipairs(queues) do
      if latest > tonumber(call('HGET', SLEEP, queue) or 0) then
        call('HSET', SLEEP, queue, text(latest))
      end
    end
  end
  return {soonest < math.huge and text(soonest) or '', false}
end

-- Note that somebody waits for the end of jobs, for so many milliseconds.
function step.watch(ms) call('SET', WATCHED, '1', 'PX', ms) end

-- --- Holding

-- For each job: 0 lost, 1 extended, 2 extended and asked to stop, 3 extended and changed. `told` has the progress by the number
-- of the job; false if there is none.
function step.extend(ids, fences, places, starts, now, lease, told)
  local lines, answers, since, leases = values(SINCE, ids), {}, {}, {}
  for i, id in ipairs(ids) do
    local fence, upto, asked, worker, rest
    if lines[i] then fence, upto, asked, worker, rest = last_claim(lines[i]) end
    if fence == fences[i] and tonumber(upto) > now then
      put(since, SINCE, id, claim_line(fence, text(lease), asked, worker, starts[i]) .. rest)
      if told and told[i] then put(since, SINCE, progress_field(id), told[i]) end
      put(leases, running(places[i]), text(lease), id)
      answers[i] = asked == '0' and '1' or asked == '1' and '2' or '3'
    else
      answers[i] = '0'
    end
  end
  write('HSET', since)
  write('ZADD', leases)
  return table.concat(answers)
end

local function was_settled(id, fence)
  local record = call('HGET', JOB, id)
  return record and record:match('^%l%d (%S+)') == fence
end

-- Each settlement has the job's new state (p if it is to be parked), score and record. If the job would
-- wait again, it also has the score and record of a cancelled job, for the case that it was asked to
-- stop. Answers n for a job that others have changed, which is left for the caller to decide.
function step.settle(now, ids, fences, places, states, scores, records, ends, stopped)
  local lines, answers, settled = values(SINCE, ids), {}, {}
  local jobs, enter, leave, clear, plain, soonest, parks = {}, {}, {}, {}, {}, {}, {}
  local over = watched_ends()
  for i, id in ipairs(ids) do
    local fence, upto, asked, worker, started, _
    if lines[i] then fence, upto, asked, worker, _, started = last_claim(lines[i]) end
    if settled[id] then
      answers[i] = settled[id] == fences[i] and '1' or '0'
    elseif fence == fences[i] and tonumber(upto) > now and (asked == '2' or asked == '3') then
      answers[i] = 'n'
    elseif fence == fences[i] and tonumber(upto) > now then
      local state, score, record = states[i], scores[i], records[i]
      if asked == '1' then
        put(clear, ASKED, asked_member(worker, id))
        if state == 'w' or state == 'p' then state, score, record = 'c', ends[i], stopped[i] end
      end
      settled[id], answers[i] = fence, '1'
      put(jobs, JOB, id, record)
      put(leave, running(places[i]), id)
      put(plain, SINCE, id)
      if has_progress(started) then put(plain, SINCE, progress_field(id)) end
      if state == 'p' then
        local queue, member = places[i]:sub(3), parking().as(id, record)
        put(enter, parked_set(queue), '0', member)
        parks[queue] = parks[queue] or {}
        sooner(parks[queue], (parking().parts(member)), score)
      else
        put(enter, set_of(state, places[i]), score, id)
        if state == 'w' then
          sooner(soonest, places[i]:sub(3), score)
        elseif over then
          over[#over + 1] = id
        end
      end
    else
      answers[i] = was_settled(id, fences[i]) and '1' or '0'
    end
  end
  local park = next(parks) and parking()
  local entries = park and park.entries_after(parks, now)
  write('HSET', jobs)
  write('ZADD', enter)
  write('ZREM', leave)
  write('HDEL', plain)
  write('ZREM', clear)
  notify(soonest)
  if park then
    park.write_entries(entries)
    park.notify(parks)
  end
  tell_ends(over)
  return table.concat(answers)
end

-- --- Operating

-- The place of each job, '' if it is unknown: for as many ids as one step may read, at least one.
function step.places(ids)
  local places = {}
  for i, record in ipairs(records_of(ids)) do places[i] = place_of(record) end
  return places
end

-- The next three answer for the first ids, as many as one step may read, or for none if the first is
-- no longer in its place.

-- For each id: u unknown, l too late, a its holder was asked to stop it, c cancelled, n others have
-- changed it, and the caller decides.
function step.cancel(ids, places, now)
  local found, count = jobs_at(ids, places)
  local answers, workers = {}, {}
  local since, enter, leave, request, clear, over = {}, {}, {}, {}, {}, watched_ends()
  for i = 1, count do
    local id = ids[i]
    local job = found[id]
    local fence, upto, asked, worker, rest, started
    if job and job.state == 'r' then
      fence, upto, asked, worker, rest, started = last_claim(job.lines)
    end
    if not job then
      answers[i] = 'u'
    elseif asked == '2' or asked == '3' then
      answers[i] = 'n'
    elseif upto and tonumber(upto) > now then
      answers[i] = 'a'
      put(since, SINCE, id, claim_line(fence, upto, '1', worker, started) .. rest)
      put(request, ASKED, '0', asked_member(worker, id))
      workers[worker] = true
    elseif job.state == 'w' or job.state == 'r' then
      answers[i] = 'c'
      put(since, SINCE, id, 'c ' .. text(now) .. (job.lines and '\n' .. job.lines or ''))
      put(enter, ended('c', job.queue), text(now), id)
      if job.parked then
        put(leave, parked_set(job.queue), job.parked)
      else
        put(leave, set_of(job.state, job.place), id)
      end
      if asked == '1' then put(clear, ASKED, asked_member(worker, id)) end
      job.state = 'c'
      if over then over[#over + 1] = id end
    else
      answers[i] = 'l'
    end
  end
  write('HSET', since)
  write('ZADD', enter)
  write('ZREM', leave)
  write('ZADD', request)
  write('ZREM', clear)
  for worker in pairs(workers) do call('PUBLISH', WAKE, 'a' .. worker) end
  tell_ends(over)
  return table.concat(answers)
end

-- The lines after a rerun. A cancel of the waiting job, and a rerun before that, leave no trace in the
-- job, so they are dropped: the lines stay few however often the two are repeated.
local function put_back(lines, now)
  local rest = lines or ''
  local below = rest:match('^c %d+\n?(.*)$')
  if below and below:sub(1, 1) ~= 'r' then rest = below:match('^w %d+\n?(.*)$') or below end
  return 'w ' .. text(now) .. (rest ~= '' and '\n' .. rest or '')
end

function step.rerun(ids, places, now)
  local found, count = jobs_at(ids, places)
  local answers, since, enter, leave, soonest = {}, {}, {}, {}, {}
  for i = 1, count do
    local id = ids[i]
    local job = found[id]
    if job and job.state ~= 'w' and job.state ~= 'r' then
      answers[i] = '1'
      put(since, SINCE, id, put_back(job.lines, now))
      put(enter, waiting(job.place), text(now), id)
      put(leave, set_of(job.state, job.place), id)
      sooner(soonest, job.queue, now)
      job.state = 'w'
    else
      answers[i] = '0'
    end
  end
  write('HSET', since)
  write('ZADD', enter)
  write('ZREM', leave)
  notify(soonest)
  return table.concat(answers)
end

function step.delete(ids, places)
  local found, count = jobs_at(ids, places)
  local answers, forget, leave, queues, gone = {}, {}, {}, {}, {}
  for i = 1, count do
    local id = ids[i]
    local job = found[id]
    if job and job.state ~= 'w' and job.state ~= 'r' then
      answers[i] = '1'
      put(forget, JOB, id)
      put(forget, SINCE, id, progress_field(id))
      put(leave, set_of(job.state, job.place), id)
      queues[job.queue], found[id] = true, nil
      gone[#gone + 1] = id
    else
      answers[i] = '0'
    end
  end
  untag(gone, forget, leave)
  write('HDEL', forget)
  write('ZREM', leave)
  forget_if_empty(queues)
  return table.concat(answers)
end

local function old_ones(key, upto, limit)
  return call('ZRANGEBYSCORE', key, '-inf', '(' .. text(upto), 'LIMIT', 0, limit)
end

-- The queues that have something to prune.
function step.old(states, names, upto)
  local found = {}
  for _, queue in ipairs(names) do
    for _, state in ipairs(states) do
      if found[#found] ~= queue and #old_ones(ended(state, queue), upto, 1) > 0 then
        found[#found + 1] = queue
      end
    end
  end
  return found
end

function step.prune(states, names, upto, limit)
  local forget, leave, queues, pruned = {}, {}, {}, 0
  for _, queue in ipairs(names) do
    for _, state in ipairs(states) do
      local key = ended(state, queue)
      local left = limit - pruned
      if left > 0 then
        local old = old_ones(key, upto, left)
        for _, id in ipairs(old) do
          put(forget, JOB, id)
          put(forget, SINCE, id, progress_field(id))
          put(leave, key, id)
          queues[queue] = true
        end
        untag(old, forget, leave)
        pruned = pruned + #old
      end
    end
  end
  write('HDEL', forget)
  write('ZREM', leave)
  forget_if_empty(queues)
  return pruned
end

function step.pause(queue, paused)
  if paused then
    call('SADD', PAUSED, queue)
    call('ZADD', NAMES, 0, queue)
  else
    call('SREM', PAUSED, queue)
    forget_if_empty({[queue] = true})
    notify({[queue] = -math.huge})
  end
end

-- Store a schedule; with a fence, only in place of the one that was read with it.
function step.schedule(name, schedule, fence)
  if fence and not unchanged(name, fence) then return 0 end
  call('HSET', SCHEDULE, name, schedule)
  return 1
end

-- Refused if memory is full, so the hash, which needs memory, comes first.
function step.put_records(kind, names, texts)
  local bodies, sorted = {}, {}
  for i, name in ipairs(names) do
    put(bodies, ROOT .. 'record:' .. kind, name, texts[i])
    put(sorted, ROOT .. 'records:' .. kind, '0', name)
  end
  write('HSET', bodies)
  write('ZADD', sorted)
end

-- Names and texts of the first records after this name.
function step.records(kind, after, limit)
  local least = after == '' and '-' or '(' .. after
  local names = call('ZRANGEBYLEX', ROOT .. 'records:' .. kind, least, '+', 'LIMIT', 0, limit)
  return {names, values(ROOT .. 'record:' .. kind, names)}
end

-- Returns 1 for each that there was, and 0 for the others.
function step.delete_records(kind, names)
  local flags = {}
  for i, name in ipairs(names) do
    flags[i] = call('HDEL', ROOT .. 'record:' .. kind, name)
    call('ZREM', ROOT .. 'records:' .. kind, name)
  end
  return table.concat(flags)
end

-- Store a worker until the time `gone`, or remove it if that is false.
function step.beat(name, worker, gone, now)
  if gone then
    call('HSET', WORKER, name, worker)
    call('ZADD', GONE, text(gone), name)
  end
  local old = call('ZRANGEBYSCORE', GONE, '-inf', '(' .. text(now), 'LIMIT', 0, FEW)
  if not gone then old[#old + 1] = name end
  for _, each in ipairs(old) do
    call('HDEL', WORKER, each)
    call('ZREM', GONE, each)
  end
end

-- `limit.admit`, in milliseconds and remaining nanoseconds: Lua's numbers can't hold nanoseconds since
-- the epoch. `cost` is one token, `burst` what may be taken in advance.
function step.throttle(key, now, cost_ms, cost_ns, burst_ms, burst_ns)
  local bucket = ROOT .. 'bucket:' .. key
  local ms, ns = (call('GET', bucket) or '0 0'):match('^(%d+) (%d+)$')
  ms, ns = tonumber(ms), tonumber(ns)
  if ms < now then ms, ns = now, 0 end
  local wait_ms, wait_ns = ms - burst_ms - now, ns - burst_ns
  if wait_ns < 0 then wait_ms, wait_ns = wait_ms - 1, wait_ns + 1000000 end
  if wait_ms > 0 or (wait_ms == 0 and wait_ns > 0) then
    return text(wait_ms + (wait_ns > 0 and 1 or 0))
  end
  ms, ns = ms + cost_ms, ns + cost_ns
  if ns >= 1000000 then ms, ns = ms + 1, ns - 1000000 end
  -- A bucket that is full again equals one that was never used. A minute more for slow clocks.
  call('SET', bucket, text(ms) .. ' ' .. text(ns), 'PX', text(ms - now + 60000))
  return '0'
end

-- --- Browsing

-- Records and lines of the first jobs: as many as one answer may hold.
function step.get(ids)
  local records = records_of(ids)
  local read = {unpack(ids, 1, #records)}
  return {records, with_progress(read, values(SINCE, read))}
end

function step.count(names)
  local found = {}
  for _, queue in ipairs(names) do
    local waits, runs = call('ZCARD', parked_set(queue)), 0
    for rank = 0, 3 do
      waits = waits + call('ZCARD', waiting(rank .. ':' .. queue))
      runs = runs + call('ZCARD', running(rank .. ':' .. queue))
    end
    local info = {queue, call('SISMEMBER', PAUSED, queue), waits, runs}
    for _, state in ipairs(ENDED) do info[#info + 1] = call('ZCARD', ended(state, queue)) end
    found[#found + 1] = info
  end
  return found
end

-- How many members of the set come before this one, or would if it were still there. A binary search
-- among those with the same score: a cursor stays valid, and nothing is scanned.
local function rank_after(key, score, id)
  local low = call('ZCOUNT', key, '-inf', '(' .. score)
  local high = low + call('ZCOUNT', key, score, score)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if before(id, call('ZRANGE', key, middle, middle)[1]) then high = middle else low = middle + 1 end
  end
  return low
end

-- The index in a set that comes after (score, id), counted from the start for waiting and running
-- jobs, and from the end for ended ones.
local function index_after(key, backwards, size, score, id)
  local rank = rank_after(key, score, id)
  if not backwards then return rank end
  local there = call('ZSCORE', key, id)
  return size - rank + ((there and tonumber(there) == tonumber(score)) and 1 or 0)
end

local function full(page)
  return #page.ids == page.limit or page.looks == 0 or page.bytes > BYTES
end

-- Add the jobs of one set to the page, after (score, id) if given; whether there was room for all. In
-- the set of parked jobs, a member takes the place of an id.
local function add_to_page(page, set, score, id)
  local key, backwards, parked = ROOT .. set, set:sub(1, 1) == 'e', set:sub(1, 3) == 'w:p'
  local size = call('ZCARD', key)
  local at = id and index_after(key, backwards, size, score, id) or 0
  while at < size do
    if full(page) then return false end
    local count = math.min(page.looks, page.task and FEW or page.limit - #page.ids)
    count = math.min(count, next_few(page.looked, page.bytes))
    local some = call(backwards and 'ZREVRANGE' or 'ZRANGE', key, at, at + count - 1, 'WITHSCORES')
    local ids = {}
    for i = 1, #some, 2 do ids[#ids + 1] = parked and select(4, parking().parts(some[i])) or some[i] end
    for i, record in ipairs(call('HMGET', JOB, unpack(ids))) do
      if full(page) then return false end
      at, page.looks, page.last = at + 1, page.looks - 1, {set, some[2 * i], some[2 * i - 1]}
      page.looked, page.bytes = page.looked + 1, page.bytes + (record and #record or 0)
      if record and (not page.task or record:find(page.task, 1, true)) then
        page.ids[#page.ids + 1], page.records[#page.records + 1] = ids[i], record
      end
    end
  end
  return true
end

-- A page of the jobs in these sets; in the first set, those after {score, id} if `after` is given.
-- `task` is the part of a record that names the task; `looked` and `bytes` count the jobs that were
-- read for this page before. Returns records, lines, the last job that was read, whether there was
-- room for all, and the two counts.
function step.find(sets, task, limit, looks, looked, bytes, after)
  local page = {
    ids = {}, records = {}, looked = looked, bytes = bytes,
    task = task, limit = limit, looks = looks - looked, last = false,
  }
  local whole = true
  for i, set in ipairs(sets) do
    local from = i == 1 and after or {}
    whole = add_to_page(page, set, from[1], from[2])
    if not whole then break end
  end
  local lines = with_progress(page.ids, values(SINCE, page.ids))
  return {page.records, lines, page.last, whole and 1 or 0, page.looked, page.bytes}
end

-- Of the jobs in these sets whose scores are from `from` to before `till`, the first `limit` by score
-- and member, {score, member}; backwards, the last. Only those after {score, member} if `after` is
-- given. Each set is read only as far as it can still add to them.
function step.timed(sets, backwards, from, till, limit, after)
  local found = {}
  local function sooner(a, b)
    if a[1] ~= b[1] then return (a[1] < b[1]) ~= backwards end
    if a[2] == b[2] then return false end
    return before(a[2], b[2]) ~= backwards
  end
  for _, set in ipairs(sets) do
    local key = ROOT .. set
    local size, at = call('ZCARD', key), 0
    if size > 0 then
      if after then at = index_after(key, backwards, size, after[1], after[2])
      elseif backwards then at = call('ZCOUNT', key, text(till), '+inf')
      else at = call('ZCOUNT', key, '-inf', '(' .. text(from)) end
    end
    local worst, more = found[limit], at < size
    while more do
      local some = call(backwards and 'ZREVRANGE' or 'ZRANGE', key, at, at + FEW - 1, 'WITHSCORES')
      for i = 1, #some, 2 do
        local entry = {tonumber(some[i + 1]), some[i]}
        more = entry[1] >= from and entry[1] < till and not (worst and sooner(worst, entry))
        if not more then break end
        found[#found + 1] = entry
      end
      at = at + FEW
      more = more and at < size and #found < 2 * limit
    end
    if #found > 1 then table.sort(found, sooner) end
    for i = #found, limit + 1, -1 do found[i] = nil end
  end
  for _, entry in ipairs(found) do entry[1] = text(entry[1]) end
  return found
end

-- How many members of these sets have a score in each slot, before the first and after the last.
function step.slots(sets, start, width, count)
  local counts = {}
  for i = 1, count + 2 do counts[i] = 0 end
  local finish = start + width * count
  for _, set in ipairs(sets) do
    local key = ROOT .. set
    counts[1] = counts[1] + call('ZCOUNT', key, '-inf', '(' .. text(start))
    counts[count + 2] = counts[count + 2] + call('ZCOUNT', key, text(finish), '+inf')
    local left, i = call('ZCOUNT', key, text(start), '(' .. text(finish)), 0
    while left > 0 do
      local first = start + i * width
      local here = call('ZCOUNT', key, text(first), '(' .. text(first + width))
      counts[i + 2], left, i = counts[i + 2] + here, left - here, i + 1
    end
  end
  return counts
end

-- The same for the parked jobs of these queues. Their members begin with task, rank and due time.
function step.parked_slots(names, start, width, count)
  local counts = {}
  for i = 1, count + 2 do counts[i] = 0 end
  for i, entry in ipairs(values(PARKED, names)) do
    local key = parked_set(names[i])
    for _, task in ipairs((parking().tasks_in(entry))) do
      for rank = 0, 3 do
        local lane = task .. '\n' .. 3 - rank
        local function up_to(due)
          return call('ZLEXCOUNT', key, '[' .. lane, '(' .. lane .. string.format('%016.0f', math.max(due, 0)))
        end
        local all, past = call('ZLEXCOUNT', key, '[' .. lane, '(' .. lane .. ':'), up_to(start)
        counts[1] = counts[1] + past
        for slot = 1, all > past and count or 0 do
          local here = up_to(start + slot * width)
          counts[slot + 1], past = counts[slot + 1] + here - past, here
          if past == all then break end
        end
        counts[count + 2] = counts[count + 2] + all - past
      end
    end
  end
  return counts
end

-- A page of the jobs with this meta ("<name>\n<value>"), by id, after `after` if given. `wanted` (a state),
-- `queue` and `task` (a part of a record, as above) are false if they don't matter. Returns records, lines, the
-- last id that was read, and whether there was room for all.
function step.tagged(meta, wanted, queue, task, limit, looks, after)
  local page = {ids = {}, records = {}, limit = limit, looks = looks, bytes = 0}
  local whole = false
  while not whole and not full(page) do
    local first = after and '(' .. meta .. '\n' .. after or '[' .. meta .. '\n'
    local count = math.min(page.looks, next_few(looks - page.looks, page.bytes))
    local some = call('ZRANGEBYLEX', TAGS, first, '(' .. meta .. '\v', 'LIMIT', 0, count)
    local ids = {}
    for i, member in ipairs(some) do ids[i] = member:sub(#meta + 2) end
    local records, lines = values(JOB, ids), values(SINCE, ids)
    whole = #some < count
    for i, id in ipairs(ids) do
      if full(page) then
        whole = false
        break
      end
      local record = records[i]
      local place, state = place_of(record)
      state = lines[i] and lines[i]:sub(1, 1) or state
      after, page.looks = id, page.looks - 1
      page.bytes = page.bytes + (record and #record or 0)
      if record and (not wanted or wanted == state) and (not queue or place:sub(3) == queue)
        and (not task or record:find(task, 1, true)) then
        page.ids[#page.ids + 1], page.records[#page.records + 1] = id, record
      end
    end
  end
  local lines = with_progress(page.ids, values(SINCE, page.ids))
  return {page.records, lines, after or false, whole and 1 or 0}
end

-- Of each of these queues and each task, the id of the parked job that is due first; at most `limit`.
function step.parked(names, limit)
  local ids = {}
  for i, entry in ipairs(values(PARKED, names)) do
    for _, task in ipairs((parking().tasks_in(entry))) do
      if #ids == limit then return ids end
      ids[#ids + 1] = select(2, parking().first(names[i], task))
    end
  end
  return ids
end

-- --- Opening

-- In layout 1 the names of queues were a set.
local function migrate_to_layout_2()
  local old, names = ROOT .. 'queues', {}
  for _, key in ipairs({old, PAUSED}) do
    for _, queue in ipairs(call('SMEMBERS', key)) do put(names, NAMES, '0', queue) end
  end
  write('ZADD', names)
  call('DEL', old)
end

-- Try every command that the steps use, so that a missing permission is found now and not in the
-- middle of a step. Returns the version of the layout; an older one is upgraded to `schema` first.
function step.open(schema)
  local key = ROOT .. 'probe'
  for _, command in ipairs({
    {'DEL', key},
    {'HSET', key, 'a', '1'}, {'HGET', key, 'a'}, {'HMGET', key, 'a'}, {'HDEL', key, 'a'},
    {'ZADD', key, 1, 'a'}, {'ZRANGE', key, 0, 0}, {'ZREVRANGE', key, 0, 0}, {'ZCARD', key},
    {'ZRANGEBYSCORE', key, 0, 1}, {'ZRANGEBYLEX', key, '-', '+'}, {'ZCOUNT', key, 0, 1},
    {'ZSCORE', key, 'a'}, {'ZREM', key, 'a'},
    {'SADD', key, 'a'}, {'SISMEMBER', key, 'a'}, {'SCARD', key}, {'SMEMBERS', key},
    {'SREM', key, 'a'}, {'EXISTS', key}, {'PUBLISH', WAKE, ''},
    {'PUBLISH', ENDS, cmsgpack.pack({})},
    {'SET', key, '1', 'PX', 60000}, {'GET', key}, {'DEL', key},
  }) do
    call(unpack(command))
  end
  local found = call('GET', ROOT .. 'schema')
  if found and tonumber(found) >= tonumber(schema) then return found end
  if found then migrate_to_layout_2() end
  call('SET', ROOT .. 'schema', schema)
  return schema
end

-- --- The call

-- The steps of changing.lua, made only if they are needed.
local function changing()
  return (function()
-- include changing.lua
  end)()
end

-- The steps that write even if memory is full. Steps that only read or delete don't need this.
local EVEN_IF_FULL = {
  claim = true, next = true, extend = true, settle = true, cancel = true, rerun = true,
  pause = true, schedule = true, beat = true, throttle = true, watch = true, change = true,
}
if EVEN_IF_FULL[ARGV[1]] then call('DEL', NONE) end

return (step[ARGV[1]] or changing()[ARGV[1]])(unpack(cmsgpack.unpack(ARGV[2])))
