-- Tickwheel on Redis: every step of a job's life as one script, so that it happens whole or not at
-- all. ARGV[1] names the step, ARGV[2] has its arguments (msgpack), KEYS[1] is the hash `job`.
--
-- All keys begin with tw:{namespace}: and so lie in one slot of a cluster.
--
--   job               hash  id → "<state><rank> <settled> <length> <queue><JSON>": the job as it was
--                           added or last settled; <settled> is the fence of that, or -
--   since             hash  id → what happened to it since then, a line each, the latest first:
--                             r <fence> <lease end> <asked> <worker>   claimed, maybe extended;
--                               where the worker told when it started the job, that is before its
--                               name, which begins with a quote
--                             c <now>                                  cancelled
--                             w <now>                                  put back to run
--   w:<rank>:<queue>  zset  ids of jobs that wait, by due time
--   r:<rank>:<queue>  zset  ids of jobs that run, by the end of their lease
--   e:<state>:<queue> zset  ids of jobs that ended, by their end
--   queues            set   queues that hold jobs
--   paused            set   queues that hand out none
--   asked:<worker>    set   ids of jobs in this worker's hand that were asked to stop
--   sleep             hash  queue → the latest due time that would wake somebody who waits
--   schedule          hash  name → "<fence> <JSON>"
--   worker            hash  name → JSON
--   gone              zset  names of workers, by when they count as gone
--   bucket:<key>      text  when a bucket is full again: "<milliseconds> <nanoseconds>"
--   schema            text  the version of this layout
--   wake              channel: "q<queue>" there may be work, "a<worker>" a job was asked to stop
--
-- States: w waiting, r running, d done, x dead, c cancelled. Ranks: 0 to 3, as priorities. A worker
-- is its name as JSON, so it has no line break. What a step means for a job is in job.py: here
-- a job is only moved, and the line that is noted in `since` is applied by whoever reads it.
--
-- Each step reads, decides, and then writes, with a command that may be refused (HSET, ZADD) first:
-- Redis does not undo what a script did before an error, but refuses only its first write.

if redis.replicate_commands then redis.replicate_commands() end

local ROOT = KEYS[1]:sub(1, -4)
local JOB, SINCE, QUEUES, PAUSED = KEYS[1], ROOT .. 'since', ROOT .. 'queues', ROOT .. 'paused'
local SLEEP, SCHEDULE, WAKE = ROOT .. 'sleep', ROOT .. 'schedule', ROOT .. 'wake'
local WORKER, GONE = ROOT .. 'worker', ROOT .. 'gone'
-- How many values one call takes; Lua can't pass on more than 8,000.
local MANY = 2000
-- How many records are read in one go, and how many bytes one step reads: jobs can be large.
local FEW, FIRST, BYTES = 100, 10, 16 * 1024 * 1024
local ENDED = {'d', 'x', 'c'}

local call = redis.call

-- --- Small tools

local function text(number) return string.format('%.0f', number) end

-- Add one value or two to the list that `lists` has for this key. The list counts itself: asking
-- for its length every time would cost more than all else here.
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

-- Call the command for each key with its list, as many values at a time as fit.
local function write(command, lists)
  for key, list in pairs(lists) do
    for first = 1, list.n, MANY do
      call(command, key, unpack(list, first, math.min(first + MANY - 1, list.n)))
    end
  end
end

-- The values of these fields, false where there is none.
local function values(key, fields)
  local found = {}
  for first = 1, #fields, MANY do
    local some = call('HMGET', key, unpack(fields, first, math.min(first + MANY - 1, #fields)))
    for i = 1, #some do found[first + i - 1] = some[i] end
  end
  return found
end

-- How many records to read next, after so many of so many bytes: about as many as still fit, if
-- they are like those before them.
local function next_few(count, bytes)
  if count == 0 then return FIRST end
  return math.max(1, math.min(FEW, math.floor((BYTES - bytes) * count / (bytes + 1))))
end

-- As many records as one step may read; at least one.
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

-- Whether one text comes before another as Redis orders them: by byte, whatever the locale.
local function before(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = a:byte(i), b:byte(i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- --- Where jobs stand

-- The key of a set by what follows `kind`; made once, because a batch asks for it again and again.
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

local waiting, running, asked_of = keys('w:'), keys('r:'), keys('asked:')
local end_of = {d = keys('e:d:'), x = keys('e:x:'), c = keys('e:c:')}
local function ended(state, queue) return end_of[state](queue) end

-- The set that a job of this state and place ("<rank>:<queue>") is in.
local function stand(state, place)
  if state == 'w' then return waiting(place) end
  if state == 'r' then return running(place) end
  return ended(state, place:sub(3))
end

-- The last claim in these lines: fence, lease end, asked, worker, all that follows it, and when the
-- job was started ("" where that is not known).
local function last_claim(lines)
  local fence, lease, asked, started, worker, rest =
    lines:match('^r (%d+) (%d+) ([01]) (%d*) ?("[^\n]*)(.*)$')
  return fence, lease, asked, worker, rest, started
end

local function claim_line(fence, lease, asked, worker, started)
  local told = started ~= '' and started .. ' ' or ''
  return 'r ' .. fence .. ' ' .. lease .. ' ' .. asked .. ' ' .. told .. worker
end

-- State, place and lines of each job by id, nothing where a job is unknown; and how many of the ids
-- one step may answer for, because their records have to be read.
local function standings(ids)
  local records, lines, found = records_of(ids), values(SINCE, ids), {}
  for i, record in ipairs(records) do
    if record then
      local state, rank, size, at = record:match('^(%l)(%d) %S+ (%d+) ()')
      local queue = record:sub(at, at + tonumber(size) - 1)
      found[ids[i]] = {
        state = lines[i] and lines[i]:sub(1, 1) or state,
        place = rank .. ':' .. queue,
        queue = queue,
        lines = lines[i],
      }
    end
  end
  return found, #records
end

-- Wake whoever waits for these queues longer than until the job that is due soonest.
local function tell(soonest)
  for queue, due in pairs(soonest) do
    local latest = call('HGET', SLEEP, queue)
    if latest and due < tonumber(latest) then
      call('HDEL', SLEEP, queue)
      call('PUBLISH', WAKE, 'q' .. queue)
    end
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
    local keys = {}
    for rank = 0, 3 do
      keys[#keys + 1] = waiting(rank .. ':' .. queue)
      keys[#keys + 1] = running(rank .. ':' .. queue)
    end
    for _, state in ipairs(ENDED) do keys[#keys + 1] = ended(state, queue) end
    if call('EXISTS', unpack(keys)) == 0 then call('SREM', QUEUES, queue) end
  end
end

-- --- Adding

local step = {}

function step.add(ids, records, places, dues)
  local taken, answers = values(JOB, ids), {}
  local jobs, sets, queues, soonest, seen = {}, {}, {}, {}, {}
  for i, id in ipairs(ids) do
    if taken[i] or seen[id] then
      answers[i] = '0'
    else
      seen[id], answers[i] = true, '1'
      put(jobs, JOB, id, records[i])
      put(sets, waiting(places[i]), dues[i], id)
      sooner(soonest, places[i]:sub(3), dues[i])
    end
  end
  write('HSET', jobs)
  write('ZADD', sets)
  for queue in pairs(soonest) do put(queues, QUEUES, queue) end
  write('SADD', queues)
  tell(soonest)
  return table.concat(answers)
end

function step.fire(name, fence, schedule, ids, records, places, dues)
  local stored = call('HGET', SCHEDULE, name)
  if not stored or stored:match('^%d+') ~= fence then return 0 end
  call('HSET', SCHEDULE, name, schedule)
  step.add(ids, records, places, dues)
  return 1
end

-- --- Claiming

-- What can be claimed of one rank, in the order in which it could be.
local function claimable(queues, rank, limit, now, ahead)
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
  if sources > 1 then
    table.sort(found, function(a, b)
      return a.since < b.since or (a.since == b.since and a.n < b.n)
    end)
  end
  return found
end

local function pick(queues, limit, now, ahead)
  local picked, ids = {}, {}
  for rank = 3, 0, -1 do
    if #picked == limit then break end
    for _, each in ipairs(claimable(queues, rank, limit - #picked, now, ahead)) do
      if #picked == limit then break end
      picked[#picked + 1] = each
      ids[#ids + 1] = each.id
    end
  end
  return picked, ids
end

-- The records of what was taken, and beside each the lines from before this claim.
function step.claim(queues, worker, fence, limit, now, ahead, lease)
  local picked, ids = pick(open_queues(queues), limit, now, ahead)
  local records, lines = records_of(ids), values(SINCE, ids)
  local taken, before_it = {}, {}
  local since, enter, leave, unasked = {}, {}, {}, {}
  local line = claim_line(fence, text(now + lease), '0', worker, '')
  for i, record in ipairs(records) do
    local id, place, old = picked[i].id, picked[i].place, lines[i]
    local asked, holder
    if picked[i].lost and old then
      asked, holder = select(3, last_claim(old))
    elseif not picked[i].lost then
      put(leave, waiting(place), id)
    end
    if not record then
      -- Somebody else's hand was in here. An id without its job must not hold up the others.
      put(leave, running(place), id)
    elseif asked == '1' then
      put(since, SINCE, id, 'c ' .. text(now) .. '\n' .. old)
      put(enter, ended('c', place:sub(3)), text(now), id)
      put(leave, running(place), id)
      put(unasked, asked_of(holder), id)
    else
      put(since, SINCE, id, old and line .. '\n' .. old or line)
      put(enter, running(place), text(now + lease), id)
      taken[#taken + 1], before_it[#before_it + 1] = record, old
    end
  end
  write('HSET', since)
  write('ZADD', enter)
  write('ZREM', leave)
  write('SREM', unasked)
  return {taken, before_it}
end

-- When a claim of these queues may next find work, or nothing. Whoever asks then waits until `upto`
-- at most, and is to be told of anything sooner.
function step.next(queues, now, upto, ahead)
  local soonest = math.huge
  for _, queue in ipairs(open_queues(queues)) do
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
  return soonest < math.huge and text(soonest) or ''
end

-- --- Holding

-- For each job: 0 it is no longer the holder's, 1 its lease was moved, 2 and it was asked to stop.
function step.extend(ids, fences, places, starts, now, lease)
  local lines, answers, since, leases = values(SINCE, ids), {}, {}, {}
  for i, id in ipairs(ids) do
    local fence, upto, asked, worker, rest
    if lines[i] then fence, upto, asked, worker, rest = last_claim(lines[i]) end
    if fence == fences[i] and tonumber(upto) > now then
      put(since, SINCE, id, claim_line(fence, text(lease), asked, worker, starts[i]) .. rest)
      put(leases, running(places[i]), text(lease), id)
      answers[i] = asked == '1' and '2' or '1'
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

-- Each settlement says what becomes of the job: state, score and record; and where it would wait
-- again, what becomes of it if it was asked to stop: score and record of a cancelled job.
function step.settle(now, ids, fences, places, states, scores, records, ends, stopped)
  local lines, answers, settled = values(SINCE, ids), {}, {}
  local jobs, enter, leave, unasked, plain, soonest = {}, {}, {}, {}, {}, {}
  for i, id in ipairs(ids) do
    local fence, upto, asked, worker
    if lines[i] then fence, upto, asked, worker = last_claim(lines[i]) end
    if settled[id] then
      answers[i] = settled[id] == fences[i] and '1' or '0'
    elseif fence == fences[i] and tonumber(upto) > now then
      local state, score, record = states[i], scores[i], records[i]
      if asked == '1' then
        put(unasked, asked_of(worker), id)
        if state == 'w' then state, score, record = 'c', ends[i], stopped[i] end
      end
      settled[id], answers[i] = fence, '1'
      put(jobs, JOB, id, record)
      put(enter, stand(state, places[i]), score, id)
      put(leave, running(places[i]), id)
      put(plain, SINCE, id)
      if state == 'w' then sooner(soonest, places[i]:sub(3), score) end
    else
      answers[i] = was_settled(id, fences[i]) and '1' or '0'
    end
  end
  write('HSET', jobs)
  write('ZADD', enter)
  write('ZREM', leave)
  write('HDEL', plain)
  write('SREM', unasked)
  tell(soonest)
  return table.concat(answers)
end

-- --- Operating

-- These three answer for as many of the ids as one step may, from the first on; at least for one.

-- For each id: u unknown, l too late, a its holder is asked, c cancelled.
function step.cancel(ids, now)
  local found, count = standings(ids)
  local answers, workers = {}, {}
  local since, enter, leave, asks, unasked = {}, {}, {}, {}, {}
  for i = 1, count do
    local id = ids[i]
    local job = found[id]
    local fence, upto, asked, worker, rest, started
    if job and job.state == 'r' then
      fence, upto, asked, worker, rest, started = last_claim(job.lines)
    end
    if not job then
      answers[i] = 'u'
    elseif upto and tonumber(upto) > now then
      answers[i] = 'a'
      put(since, SINCE, id, claim_line(fence, upto, '1', worker, started) .. rest)
      put(asks, asked_of(worker), id)
      workers[worker] = true
    elseif job.state == 'w' or job.state == 'r' then
      answers[i] = 'c'
      put(since, SINCE, id, 'c ' .. text(now) .. (job.lines and '\n' .. job.lines or ''))
      put(enter, ended('c', job.queue), text(now), id)
      put(leave, stand(job.state, job.place), id)
      if asked == '1' then put(unasked, asked_of(worker), id) end
      job.state = 'c'
    else
      answers[i] = 'l'
    end
  end
  write('HSET', since)
  write('ZADD', enter)
  write('ZREM', leave)
  write('SADD', asks)
  write('SREM', unasked)
  for worker in pairs(workers) do call('PUBLISH', WAKE, 'a' .. worker) end
  return table.concat(answers)
end

-- The lines that a rerun leaves. A cancel while the job waited, and a rerun before that, leave no
-- trace in the job, so they go: however often somebody does the two, the lines stay few.
local function put_back(lines, now)
  local rest = lines or ''
  local below = rest:match('^c %d+\n?(.*)$')
  if below and below:sub(1, 1) ~= 'r' then rest = below:match('^w %d+\n?(.*)$') or below end
  return 'w ' .. text(now) .. (rest ~= '' and '\n' .. rest or '')
end

function step.rerun(ids, now)
  local found, count = standings(ids)
  local answers, since, enter, leave, soonest = {}, {}, {}, {}, {}
  for i = 1, count do
    local id = ids[i]
    local job = found[id]
    if job and job.state ~= 'w' and job.state ~= 'r' then
      answers[i] = '1'
      put(since, SINCE, id, put_back(job.lines, now))
      put(enter, waiting(job.place), text(now), id)
      put(leave, stand(job.state, job.place), id)
      sooner(soonest, job.queue, now)
      job.state = 'w'
    else
      answers[i] = '0'
    end
  end
  write('HSET', since)
  write('ZADD', enter)
  write('ZREM', leave)
  tell(soonest)
  return table.concat(answers)
end

function step.delete(ids)
  local found, count = standings(ids)
  local answers, forget, leave, queues = {}, {}, {}, {}
  for i = 1, count do
    local id = ids[i]
    local job = found[id]
    if job and job.state ~= 'w' and job.state ~= 'r' then
      answers[i] = '1'
      put(forget, JOB, id)
      put(forget, SINCE, id)
      put(leave, stand(job.state, job.place), id)
      queues[job.queue], found[id] = true, nil
    else
      answers[i] = '0'
    end
  end
  write('HDEL', forget)
  write('ZREM', leave)
  forget_if_empty(queues)
  return table.concat(answers)
end

function step.prune(states, upto, limit)
  local forget, leave, queues, pruned = {}, {}, {}, 0
  for _, queue in ipairs(call('SMEMBERS', QUEUES)) do
    for _, state in ipairs(states) do
      local key = ended(state, queue)
      local left = limit - pruned
      if left > 0 then
        local old = call('ZRANGEBYSCORE', key, '-inf', '(' .. text(upto), 'LIMIT', 0, left)
        for _, id in ipairs(old) do
          put(forget, JOB, id)
          put(forget, SINCE, id)
          put(leave, key, id)
          queues[queue] = true
        end
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
  call(paused and 'SADD' or 'SREM', PAUSED, queue)
  if not paused then tell({[queue] = -math.huge}) end
end

-- Note that a worker lives until it counts as `gone`, or strike it off where that is false.
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

-- `throttle.admit`, in milliseconds and the nanoseconds beyond: Lua's numbers are too coarse for
-- nanoseconds since the epoch. `cost` is one token, `burst` what may be taken in advance.
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
  -- A bucket that is full again is as good as one that was never used; a minute for slow clocks.
  call('SET', bucket, text(ms) .. ' ' .. text(ns), 'PX', text(ms - now + 60000))
  return '0'
end

-- --- Looking

-- Records and lines of as many of the jobs as one answer may hold, from the first on.
function step.get(ids)
  local records = records_of(ids)
  return {records, values(SINCE, {unpack(ids, 1, #records)})}
end

function step.queues()
  local found = {}
  for _, queue in ipairs(call('SUNION', QUEUES, PAUSED)) do
    local waits, runs = 0, 0
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

-- How many members of the set come before this one, or would if it were still there. Found by
-- halving among those of the same score: a cursor is never lost, and nothing is scanned.
local function rank_after(key, score, id)
  local low = call('ZCOUNT', key, '-inf', '(' .. score)
  local high = low + call('ZCOUNT', key, score, score)
  while low < high do
    local middle = math.floor((low + high) / 2)
    if before(id, call('ZRANGE', key, middle, middle)[1]) then high = middle else low = middle + 1 end
  end
  return low
end

-- Where to go on in a set after (score, id): from the start where jobs wait or run, from the end
-- where they have ended.
local function go_on(key, backwards, size, score, id)
  local rank = rank_after(key, score, id)
  if not backwards then return rank end
  local there = call('ZSCORE', key, id)
  return size - rank + ((there and tonumber(there) == tonumber(score)) and 1 or 0)
end

-- All sets of these states and of one queue or all, in the order in which they are paged.
local function sets_of(states, queue, after)
  local names = queue and {queue} or call('SMEMBERS', QUEUES)
  if after and not queue then names[#names + 1] = after:sub(5) end
  table.sort(names, before)
  local sets = {}
  for _, state in ipairs(states) do
    for i, name in ipairs(names) do
      if name ~= names[i - 1] then
        if state == 'w' or state == 'r' then
          for rank = 3, 0, -1 do sets[#sets + 1] = state .. ':' .. rank .. ':' .. name end
        else
          sets[#sets + 1] = 'e:' .. state .. ':' .. name
        end
      end
    end
  end
  return sets
end

local function full(page)
  return #page.ids == page.limit or page.looks == 0 or page.bytes > BYTES
end

-- Look through one set from where the page goes on; whether the page had room for all of it.
local function look_through(page, set, score, id)
  local key, backwards = ROOT .. set, set:sub(1, 1) == 'e'
  local size = call('ZCARD', key)
  local at = id and go_on(key, backwards, size, score, id) or 0
  while at < size do
    if full(page) then return false end
    local count = math.min(page.looks, page.task and FEW or page.limit - #page.ids)
    count = math.min(count, next_few(page.looked, page.bytes))
    local some = call(backwards and 'ZREVRANGE' or 'ZRANGE', key, at, at + count - 1, 'WITHSCORES')
    local ids = {}
    for i = 1, #some, 2 do ids[#ids + 1] = some[i] end
    for i, record in ipairs(call('HMGET', JOB, unpack(ids))) do
      if full(page) then return false end
      at, page.looks, page.last = at + 1, page.looks - 1, {set, some[2 * i], ids[i]}
      page.looked, page.bytes = page.looked + 1, page.bytes + (record and #record or 0)
      if record and (not page.task or record:find(page.task, 1, true)) then
        page.ids[#page.ids + 1], page.records[#page.records + 1] = ids[i], record
      end
    end
  end
  return true
end

-- A page of jobs after {set, score, id}, where that is given. `task` is the part of a record that
-- names the task. Answers with records, lines, and the last that was looked at if more may follow.
function step.find(states, queue, task, limit, looks, after)
  local page = {
    ids = {}, records = {}, looked = 0, bytes = 0,
    task = task, limit = limit, looks = looks, last = after,
  }
  local going = not after
  for _, set in ipairs(sets_of(states, queue, after and after[1])) do
    local whole = true
    if going then
      whole = look_through(page, set)
    elseif set == after[1] then
      going = true
      whole = look_through(page, set, after[2], after[3])
    end
    if not whole then return {page.records, values(SINCE, page.ids), page.last} end
  end
  return {page.records, values(SINCE, page.ids), false}
end

-- --- Opening

-- Every command that the steps use, tried on a key of its own: better a clear no now than half
-- a step later. Answers with the schema that is there, which is `schema` where there was none.
function step.open(schema)
  local key = ROOT .. 'probe'
  call('DEL', key)
  for _, command in ipairs({
    {'HSET', key, 'a', '1'}, {'HGET', key, 'a'}, {'HMGET', key, 'a'}, {'HDEL', key, 'a'},
    {'ZADD', key, 1, 'a'}, {'ZRANGE', key, 0, 0}, {'ZREVRANGE', key, 0, 0}, {'ZCARD', key},
    {'ZRANGEBYSCORE', key, 0, 1}, {'ZCOUNT', key, 0, 1}, {'ZSCORE', key, 'a'}, {'ZREM', key, 'a'},
    {'SADD', key, 'a'}, {'SISMEMBER', key, 'a'}, {'SCARD', key}, {'SMEMBERS', key},
    {'SUNION', key, key}, {'SREM', key, 'a'}, {'EXISTS', key}, {'PUBLISH', WAKE, ''},
    {'SET', key, '1', 'PX', 60000}, {'GET', key}, {'DEL', key},
  }) do
    call(unpack(command))
  end
  local found = call('GET', ROOT .. 'schema')
  if not found then call('SET', ROOT .. 'schema', schema) end
  return found or schema
end

return step[ARGV[1]](unpack(cmsgpack.unpack(ARGV[2])))
