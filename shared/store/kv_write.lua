-- Write consecutive rows into pages, never leaving a gap. Returns 1, or 0 when rows before are missing.
-- KEYS: the page before the first when the rows begin a page and are not the first ones, then the
-- pages. ARGV: bytes of a page, offset of the rows in the first page, ms to live, '1' if the page
-- before is given, rows.
local page_bytes, offset, rows = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[5]
local lengths = {}
for i = 1, #KEYS do
  lengths[i] = redis.pcall('STRLEN', KEYS[i])
  if type(lengths[i]) == 'table' then
    -- Of another type: it holds no rows, and goes, so that they can be written again.
    redis.call('DEL', KEYS[i])
    lengths[i] = 0
  end
end
local first = 1
if ARGV[4] == '1' then
  if lengths[1] < page_bytes then
    return 0
  end
  first = 2
elseif lengths[1] < offset then
  return 0
end
if first == #KEYS then
  redis.call('SETRANGE', KEYS[first], offset, rows)
  redis.call('PEXPIRE', KEYS[first], ARGV[3])
  return 1
end
local start = 1
for i = first, #KEYS do
  local stop = start + page_bytes - offset - 1
  redis.call('SETRANGE', KEYS[i], offset, string.sub(rows, start, stop))
  redis.call('PEXPIRE', KEYS[i], ARGV[3])
  start = stop + 1
  offset = 0
end
return 1
