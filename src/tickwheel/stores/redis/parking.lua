-- Parked jobs: a part of statements.lua, which describes the keys. It is the body of a function that
-- is called only by a step that has to do with parked jobs.

-- Milliseconds: see `parked`.
local FRESH, FORGET = 30000, 60000

-- --- Jobs

-- The member of a parked job in the set of its queue, nil for other jobs. Inside a string, JSON has
-- its quotes escaped, so no text of a user's is taken for one of these names.
local function parked_as(id, record)
  local place, _, json = place_of(record)
  if not record or not record:find('"parked":true', json, true) then return nil end
  local task = record:match('"task":(".-"),"payload":', json)
  local due = math.max(tonumber(record:match('"due_ms":(%-?%d+)', json)), 0)
  return task .. '\n' .. 3 - place:sub(1, 1) .. string.format('%016.0f', due) .. id
end

-- Task, rank, due time and id in such a member.
local function parts_of(member)
  local at = member:find('\n', 1, true)
  local rank, due = 3 - member:sub(at + 1, at + 1), tonumber(member:sub(at + 2, at + 17))
  return member:sub(1, at - 1), rank, due, member:sub(at + 18)
end

-- Up to `limit` members of this task, from this rank downwards.
local function parked_from(queue, task, rank, limit)
  local first, last = '[' .. task .. '\n' .. 3 - rank, '(' .. task .. '\v'
  return call('ZRANGEBYLEX', parked_set(queue), first, last, 'LIMIT', 0, limit)
end

-- When the first parked job of this queue and task is due, whatever its rank, and its id; never and
-- nil if there is none.
local function first_parked(queue, task)
  local soonest, first, rank = math.huge, nil, 3
  while rank >= 0 do
    local member = parked_from(queue, task, rank, 1)[1]
    if not member then break end
    local _, found, due, id = parts_of(member)
    if due < soonest then soonest, first = due, id end
    rank = found - 1
  end
  return soonest, first
end

-- --- Tasks

-- The tasks in an entry of `parked`, in their order, and when each was last parked.
local function tasks_in(entry)
  local tasks, times = {}, {}
  for task, time in (entry or ''):gmatch('\n([^\n]*) (%d+)') do
    tasks[#tasks + 1], times[task] = task, tonumber(time)
  end
  return tasks, times
end

-- An entry with these tasks but for those that are to be forgotten; '' if none is left.
local function entry_of(queue, tasks, times, now)
  local kept, lines = {}, {}
  for _, task in ipairs(tasks) do
    if times[task] > now - FORGET or #parked_from(queue, task, 3, 1) > 0 then
      kept[#kept + 1], lines[#lines + 1] = task, task .. ' ' .. text(times[task])
    end
  end
  if #kept == 0 then return '' end
  return redis.sha1hex(table.concat(kept, '\n')) .. '\n' .. table.concat(lines, '\n')
end

-- The entries that change because jobs are parked. `parks` has their due times by queue and task.
local function entries_after(parks, now)
  local changed = {}
  for queue, dues in pairs(parks) do
    local tasks, times = tasks_in(call('HGET', PARKED, queue))
    local stale = false
    for task in pairs(dues) do
      if not times[task] then tasks[#tasks + 1] = task end
      if not times[task] or times[task] < now - FRESH then times[task], stale = now, true end
    end
    if stale then changed[queue] = entry_of(queue, tasks, times, now) end
  end
  return changed
end

local function write_entries(entries)
  for queue, entry in pairs(entries) do
    if entry == '' then call('HDEL', PARKED, queue) else call('HSET', PARKED, queue, entry) end
  end
end

-- The entries that change because tasks without parked jobs are to be forgotten.
local function entries_without(empty, queues, entries, now)
  local changed = {}
  for i, queue in ipairs(queues) do
    if empty[queue] and entries[i] then
      local tasks, times = tasks_in(entries[i])
      local entry = entry_of(queue, tasks, times, now)
      if entry ~= entries[i] then changed[queue] = entry end
    end
  end
  return changed
end

-- Notify waits on these queues for these tasks. Others sleep on, so `sleep` stays.
local function notify_parked(parks)
  for queue, tasks in pairs(parks) do
    local latest = tonumber(call('HGET', SLEEP, queue) or 0)
    for task, due in pairs(tasks) do
      if due < latest then call('PUBLISH', WAKE, 'p' .. queue .. '\n' .. task) end
    end
  end
end

-- --- Claiming

-- The next parked job of a line: highest rank first, then by due time. A line reads `some` members at
-- a time; what is not due yet it skips, rank by rank.
local function next_parked(line)
  while true do
    if line.at > #line.members then
      if not line.from then return nil end
      local last = '(' .. line.task .. '\v'
      line.members = call('ZRANGEBYLEX', line.key, line.from, last, 'LIMIT', 0, line.some)
      if line.empty == nil then line.empty = #line.members == 0 end
      line.at, line.from = 1, #line.members == line.some and '(' .. line.members[line.some] or nil
      if #line.members == 0 then return nil end
    end
    local member = line.members[line.at]
    local _, rank, due, id = parts_of(member)
    line.at = line.at + 1
    if due <= line.latest then
      return {id = id, place = rank .. ':' .. line.queue, rank = rank, due = due, member = member}
    end
    if rank == 0 then return nil end
    line.members, line.at, line.from = {}, 1, '[' .. line.task .. '\n' .. 4 - rank
  end
end

local function better(a, b)
  if a.job.rank ~= b.job.rank then return a.job.rank > b.job.rank end
  return a.job.due < b.job.due
end

-- Move the line at `i` of a heap down to where it belongs.
local function sink(heap, i)
  while true do
    local best, left = i, 2 * i
    for child = left, math.min(left + 1, #heap) do
      if better(heap[child], heap[best]) then best = child end
    end
    if best == i then return end
    heap[i], heap[best], i = heap[best], heap[i], best
  end
end

-- A heap with a line of claimable jobs for each queue and task with parked jobs that the caller knows.
-- Also returns the queues in which some of the tasks have no parked jobs.
local function parked_lines(queues, known, limit, latest)
  local lines, empty = {}, {}
  for _, queue in ipairs(queues) do
    for _, task in ipairs(known[queue] and known[queue][2] or {}) do
      lines[#lines + 1] = {
        queue = queue, task = task, key = parked_set(queue), latest = latest,
        members = {}, at = 1, from = '[' .. task .. '\n',
      }
    end
  end
  local heap = {}
  for _, line in ipairs(lines) do
    line.some = math.min(MANY, math.ceil(limit / #lines))
    line.job = next_parked(line)
    if line.job then heap[#heap + 1] = line end
    if line.empty then empty[line.queue] = true end
  end
  for i = math.floor(#heap / 2), 1, -1 do sink(heap, i) end
  return heap, empty
end

-- Take the best job of a heap of lines, if it has this rank.
local function take_parked(heap, rank)
  local line = heap[1]
  local job = line and line.job
  if not job or job.rank ~= rank then return nil end
  line.job = next_parked(line)
  if not line.job then
    heap[1] = heap[#heap]
    heap[#heap] = nil
  end
  sink(heap, 1)
  return job
end

return {
  as = parked_as, parts = parts_of, first = first_parked,
  tasks_in = tasks_in, entries_after = entries_after, entries_without = entries_without,
  write_entries = write_entries, notify = notify_parked,
  lines = parked_lines, take = take_parked,
}
