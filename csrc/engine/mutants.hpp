// Kept mutants: faults that the simulation's oracles must catch within the default seeds. They exist only where
// EXPERTWIRE_MUTANTS is defined (the `_simulation` module); everywhere else mutant() is a constant false.
#pragma once

#include <cstdint>

namespace expertwire {

enum class Mutant : std::uint8_t {
    none = 0,
    no_gate,                  // signals leave at once
    count_for_prefix,         // a gate counts completions instead of waiting for the retired prefix
    no_generation_check,      // a completion is matched by its slot alone
    publish_before_drain,     // a failing request turns terminal while its posted work is still in flight
    no_epoch_in_counters,     // exchange: words carry counts without their epoch
    no_wait_for_notify,       // exchange: rows leave before all notifies are here
    combine_without_notify,   // exchange: a combine begins without waiting for a notify
    no_staging_credit,        // exchange: a ring's slot is filled again before its chunk has been consumed
    no_wait_for_window,       // exchange: a row is placed in a window before the row that was there has been taken
    no_wait_for_readers,      // exchange: a row of a combine is copied over one that has not been read
    buffer_freed_at_timeout,  // the hard deadline turns a request terminal instead of quarantining its slots
    long_write,               // a write takes eight bytes more than it was asked for
    no_consumed_gate,         // low latency: rows leave before the peer has consumed the call before the last
    flag_before_rows,         // low latency: a rank of the node is told of rows before they are there
    consumed_before_packed,   // low latency: peers are told that rows are consumed before they are packed
    consumed_in_flight,       // low latency: peers may overwrite rows that are still on their way out
    any_flag,                 // low latency: rows of an older call are taken for this one's
    reused_in_flight,         // low latency: rows on their way out are overwritten by the call after the next
    mask_forgets_consumed,    // low latency: a rank that is unmasked is not told what it missed
    told_of_overwritten,      // low latency: rows for who is masked are given up, and yet their word goes there
    late_rows_forgotten,      // low latency: who writes no more is held not to have written late before
    never_reopens,            // a lane that aborted stays closed to what was accepted since
    count_one_fewer,          // class C: the target adds a signal one immediate too early
    tag_freed_at_failure,     // class C: the tag of a failed write is used again before its immediate has come
    join_over_gap,            // chunks are posted as one that are neighbours here, and not there
    join_ends_one,            // the end of what was posted as one ends the first of it
};

#ifdef EXPERTWIRE_MUTANTS
// Their names, for whoever asks for one by name. Each stands beside its value: two lists in the same order once
// drifted apart when two changes met.
struct NamedMutant {
    Mutant mutant;
    const char* name;
};
inline constexpr NamedMutant named_mutants[] = {
    {Mutant::none, "none"},
    {Mutant::no_gate, "no_gate"},
    {Mutant::count_for_prefix, "count_for_prefix"},
    {Mutant::no_generation_check, "no_generation_check"},
    {Mutant::publish_before_drain, "publish_before_drain"},
    {Mutant::no_epoch_in_counters, "no_epoch_in_counters"},
    {Mutant::no_wait_for_notify, "no_wait_for_notify"},
    {Mutant::combine_without_notify, "combine_without_notify"},
    {Mutant::no_staging_credit, "no_staging_credit"},
    {Mutant::no_wait_for_window, "no_wait_for_window"},
    {Mutant::no_wait_for_readers, "no_wait_for_readers"},
    {Mutant::buffer_freed_at_timeout, "buffer_freed_at_timeout"},
    {Mutant::long_write, "long_write"},
    {Mutant::no_consumed_gate, "no_consumed_gate"},
    {Mutant::flag_before_rows, "flag_before_rows"},
    {Mutant::consumed_before_packed, "consumed_before_packed"},
    {Mutant::consumed_in_flight, "consumed_in_flight"},
    {Mutant::any_flag, "any_flag"},
    {Mutant::reused_in_flight, "reused_in_flight"},
    {Mutant::mask_forgets_consumed, "mask_forgets_consumed"},
    {Mutant::told_of_overwritten, "told_of_overwritten"},
    {Mutant::late_rows_forgotten, "late_rows_forgotten"},
    {Mutant::never_reopens, "never_reopens"},
    {Mutant::count_one_fewer, "count_one_fewer"},
    {Mutant::tag_freed_at_failure, "tag_freed_at_failure"},
    {Mutant::join_over_gap, "join_over_gap"},
    {Mutant::join_ends_one, "join_ends_one"},
};

inline Mutant active_mutant = Mutant::none;  // one value for the process, set before a run, by its one caller
inline bool mutant(Mutant which) {
    return active_mutant == which;
}
#else
constexpr bool mutant(Mutant) {
    return false;
}
#endif

}  // namespace expertwire
