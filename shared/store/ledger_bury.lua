-- End a request whose record or events were lost or damaged; what is left of them goes.
-- KEYS: ledger, events. ARGV: error, ms to live, code of the error, then field, value, ... of its
-- record.
redis.call('DEL', KEYS[1], KEYS[2])
-- '*' is the time in ms: after every position, so that a reader who has seen tokens sees it too.
redis.call('XADD', KEYS[2], '*', 'reason', 'error', 'error', ARGV[1],
  'num_prompt', 0, 'num_generated', 0, 'code', ARGV[3])
redis.call('HSET', KEYS[1], unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
