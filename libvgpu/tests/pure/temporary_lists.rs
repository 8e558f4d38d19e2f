//! Lists that live for one call.

use crate::system::temporary_list::TemporaryList;

#[test]
fn holds_values_up_to_capacity() {
    for capacity in [0, 1, 7, 8, 9, 500] {
        let mut list = TemporaryList::with_capacity(capacity).unwrap();
        assert_eq!(list.as_mut_slice(), [0u64; 0]);
        let values = 0..=u64::try_from(capacity).unwrap();
        assert_eq!(list.room(), capacity);
        values.for_each(|value| list.push(value));
        assert_eq!(list.room(), 0);
        let expected: Vec<u64> = (0..).take(capacity).collect();
        assert_eq!(list.as_mut_slice(), expected);
        for value in list.as_mut_slice() {
            *value += 1;
        }
        // Values stay where the list moves.
        let mut moved = list;
        assert_eq!(
            moved.as_mut_slice().last().copied(),
            expected.last().map(|last| last + 1)
        );
    }
}

#[test]
fn has_no_list_of_impossible_size() {
    assert!(TemporaryList::<[u64; 8]>::with_capacity(usize::MAX).is_none());
}
